"""Making many objects of which none is garbage."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["collection_paused"]


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Hold the garbage collector back for a few lines.

    Records of ten thousand tensors make it go over all objects of the process, which in one that
    trains takes longer than the lines themselves.
    """
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
