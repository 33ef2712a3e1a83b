"""Giving memory that was freed back to the operating system."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

__all__ = ["trim"]


def trim(allowed: int = 0) -> None:
    """Let the C library return free memory, where it can be asked to.

    glibc keeps what lies below anything in use, and finds no place among it for the next tensor
    of the same size, which has to be aligned: after some rounds of large tensors that come and go
    that is many times the memory in use.

    Parameters
    ----------
    allowed : int
        Bytes that it may keep: with less free memory nothing is done.
    """
    if _free_bytes() > allowed:
        _c_function("malloc_trim")(0)


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _free_bytes() -> int:
    """Return what the C library keeps of this thread's kind of memory; 1 if it doesn't say."""
    found = _c_function("mallinfo2")()
    return found.fordblks if isinstance(found, _Mallinfo2) else 1


@functools.cache
def _c_function(name: str) -> Callable[..., object]:
    try:
        found = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):  # not glibc, or an old one
        return lambda *_: None
    if name == "mallinfo2":
        found.restype = _Mallinfo2
    function: Callable[..., object] = found
    return function
