"""Memory to move: fresh random content, addresses of every kind, poison, comparison."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from tensorspill.errors import CorruptError
from tensorspill.pool.slab import Slab

__all__ = [
    "check_same",
    "cut",
    "locked",
    "odd_tensor",
    "ordinary_tensor",
    "page_aligned",
    "poison",
    "randomize",
    "refresh",
]

PAGE = 4096
_POISON = 0xA5

#: An address that nothing is aligned to.
_ODD = 13

#: One byte in every 512 and less is changed, so that no block of a drive stays what it was.
_STRIDE = 509


def page_aligned(nbytes: int, huge_pages: bool = True) -> torch.Tensor:
    """Return page-aligned memory, all pages present, as one uint8 tensor.

    Parameters
    ----------
    nbytes : int
    huge_pages : bool
        Advise the kernel to use huge pages, as the library's pools do; torch doesn't.
    """
    tensor = Slab(nbytes, huge_pages=huge_pages, page_lock="no").tensor
    tensor.fill_(0)
    return tensor


def ordinary_tensor(nbytes: int) -> torch.Tensor:
    """Return what torch allocates: aligned to 64 bytes and not to any block of a drive."""
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = 0 if raw.data_ptr() % 512 else 64
    tensor = raw[start : start + nbytes]
    tensor.fill_(0)
    return tensor


def odd_tensor(nbytes: int) -> torch.Tensor:
    """Return memory at an odd address."""
    raw = torch.empty(nbytes + PAGE, dtype=torch.uint8)
    start = (_ODD - raw.data_ptr()) % PAGE
    tensor = raw[start : start + nbytes]
    tensor.fill_(0)
    return tensor


@contextmanager
def locked(tensor: torch.Tensor) -> Iterator[bool]:
    """Keep a tensor's pages in memory (mlock) meanwhile; say whether that was allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    where, size = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    allowed = libc.mlock(where, size) == 0
    try:
        yield allowed
    finally:
        if allowed:
            libc.munlock(where, size)


def cut(tensor: torch.Tensor, nbytes: int) -> list[torch.Tensor]:
    """Divide uint8 memory into views of `nbytes` each, the last one perhaps smaller."""
    return [tensor[begin : begin + nbytes] for begin in range(0, tensor.nbytes, nbytes)]


def randomize(tensor: torch.Tensor) -> None:
    """Fill memory with fresh random bytes."""
    seed = int.from_bytes(os.urandom(8), "little")
    generator = np.random.Generator(np.random.SFC64(seed))
    view, step = tensor.view(torch.uint8).reshape(-1).numpy(), 16 << 20
    for begin in range(0, len(view), step):
        part = view[begin : begin + step]
        part[:] = np.frombuffer(generator.bytes(len(part)), np.uint8)


def refresh(tensor: torch.Tensor) -> None:
    """Change something in every 512 bytes, so that nothing can be found to be the same."""
    tensor.view(torch.uint8).reshape(-1).numpy()[::_STRIDE] += np.uint8(1)


def poison(tensor: torch.Tensor) -> None:
    """Fill a destination, so that a byte that is not read shows."""
    tensor.view(torch.uint8).reshape(-1).fill_(_POISON)


def check_same(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compare all bytes.

    Raises
    ------
    CorruptError
        They differ, so the time of whatever moved them is worth nothing.
    """
    if not torch.equal(found, expected):
        raise CorruptError(f"{what}: the bytes read are not the bytes written")
