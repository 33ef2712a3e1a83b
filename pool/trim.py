"""Giving memory that was freed back to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["trim"]


def trim() -> None:
    """Let the C library return free memory now, where it can be asked to.

    glibc keeps what lies below anything in use: after several rounds of large tensors that come and
    go that is many times the memory in use.
    """
    _find_trim()(0)


@functools.cache
def _find_trim() -> Callable[[int], object]:
    try:
        found: Callable[[int], object] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # not glibc
        return lambda _: None
    return found
