"""Letting Python's garbage collector wait while many small objects are made that are all kept."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["no_collection"]

_lock = threading.Lock()
_users = 0
_was_on = False


@contextmanager
def no_collection() -> Iterator[None]:
    """Start no collection meanwhile.

    A description of ten thousand tensors is several times as many objects, each thousand of which
    can start a walk over all objects of a large process: longer than making them takes.
    """
    global _users, _was_on
    with _lock:
        if not _users:
            _was_on = gc.isenabled()
            gc.disable()
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users -= 1
            if not _users and _was_on:
                gc.enable()
