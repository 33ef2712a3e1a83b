"""Buffers at random places of memory that is poisoned whenever it is free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from tensorspill.pool import BufferPool
from tensorspill.pool.sizes import parse_bytes, round_up
from tests.residency.test_residency import Scattering

__all__ = ["Scattering", "scattering"]


@contextmanager
def scattering(seed: int = 0) -> Iterator[None]:
    """Let pools that swappers and gradients make hand out memory in random order, poisoned."""

    def make(nbytes: int | str, device: Any = "cpu") -> BufferPool:
        size = round_up(parse_bytes(nbytes), 4096)
        allocator = Scattering(size, seed)
        return BufferPool(size, device, page_lock="no", allocator=allocator, poison=True)

    with (
        mock.patch("tensorspill.swap.core.BufferPool", make),
        mock.patch("tensorspill.residency.gradients.BufferPool", make),
    ):
        yield
