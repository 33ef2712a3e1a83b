"""In a process on the stand-in: engines, and buffers of random content with guards."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

import tensorspill
from tensorspill.engine import Engine
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.streams import Stream
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda

__all__ = ["GUARD", "SEAMS", "Guarded", "held_stream", "open_staged", "random_array"]

GUARD = 64

#: Blocks so small that short transfers cross every seam.
SEAMS = {"staging_block": 4096, "staging_bytes": 3 * 4096, "block_bytes": 4096, "depth": 3}


def open_staged(folder: Any, **options: Any) -> Engine:
    return tensorspill.open_engine(folder, "cuda:0", backend="aio", **options)


def random_array(nbytes: int) -> tuple[DeviceArray, NDArray[np.uint8]]:
    """Return device memory and its fresh random content."""
    content = np.frombuffer(os.urandom(nbytes), "u1")
    array = DeviceArray(nbytes)
    array.store(content)
    return array, content


class Guarded:
    """Device memory at any misalignment, poisoned, with poison on either side."""

    def __init__(self, nbytes: int, shift: int = 0) -> None:
        self._whole = DeviceArray(nbytes + 2 * GUARD + 4096)
        start = (shift - self._whole.address - GUARD) % 4096 + GUARD
        self._start = start
        self._poison = np.full(self._whole.nbytes, 0xA5, "u1")
        self._whole.store(self._poison)
        self.array = self._whole[start : start + nbytes]

    def content(self) -> NDArray[np.uint8]:
        """Return the bytes between the guards, which must be intact."""
        whole, end = self._whole.load(), self._start + self.array.nbytes
        assert (whole[: self._start] == 0xA5).all()
        assert (whole[end:] == 0xA5).all()
        return whole[self._start : end]


@contextmanager
def held_stream() -> Iterator[Stream]:
    """Yield a stream that has not come to what is recorded on it, until the block ends."""
    # Freeing memory waits for all streams of a device: garbage has to go before.
    gc.collect()
    with Stream(0) as stream, current(0):
        with cuda().holding(stream.handle):
            yield stream
        stream.synchronize()
