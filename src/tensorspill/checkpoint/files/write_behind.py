"""A file that is written from its start to its end, behind the back of whoever fills it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections import deque
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.engine.request import Request
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import NoSpaceError
from tensorspill.pool.slab import Slab

__all__ = ["WriteBehind"]

SMALLEST_STEP, LARGEST_STEP = 64 << 20, 1 << 30


class WriteBehind:
    """Copies what it is given into buffers, and writes full ones while the next is filled.

    Parameters
    ----------
    engine : Engine
        For host memory.
    name : str
        Of a new file in the engine's folder.
    buffer_bytes : int
        Of each buffer; a multiple of 4096.
    buffers : int
        Two at least.

    Attributes
    ----------
    position : int
        Bytes given so far.
    """

    def __init__(self, engine: Engine, name: str, buffer_bytes: int, buffers: int) -> None:
        self.position = 0
        self._engine = engine
        self._name = name
        self._nbytes = buffer_bytes
        self._file: File = engine.open(name, "x")
        # All requests are whole buffers, so that the last one may be padded.
        self._file.exclusive = True
        # For as long as it is open: without the lock, a file of this name is a leftover.
        with contextlib.suppress(OSError):
            fcntl.flock(self._file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._allocated = 0
        self._slab = Slab(buffers * buffer_bytes, page_lock="no")
        memory = self._slab.array
        self._free = deque(
            memory[start : start + buffer_bytes] for start in range(0, memory.size, buffer_bytes)
        )
        self._current: NDArray[np.uint8] = self._free.popleft()
        self._used = 0
        self._live: deque[tuple[Transfer, NDArray[np.uint8]]] = deque()

    def write(self, data: NDArray[np.uint8]) -> None:
        """Take bytes; they may be changed as soon as this returns.

        Raises
        ------
        BrokenError
            This write or an earlier one failed; the file is of no use any more.
        """
        done = 0
        while done < data.size:
            part = min(data.size - done, self._nbytes - self._used)
            np.copyto(self._current[self._used : self._used + part], data[done : done + part])
            self._used += part
            self.position += part
            done += part
            if self._used == self._nbytes:
                self._submit()

    def drain(self) -> None:
        """Write what there is of the last buffer, and wait for everything; raises as `write`."""
        if self._used:
            self._submit()
        while self._live:
            self._retire()

    def finish(self) -> None:
        """Write everything, give the file its length, make it durable; raises as `write`."""
        self.drain()
        os.ftruncate(self._file.fd, self.position)
        self._file.sync()

    def _submit(self) -> None:
        offset = self.position - self._used
        self._reserve(self.position)
        request = Request(self._current, self._file, offset, self._used, write=True)
        self._live.append((self._engine.submit([request]), self._current))
        self._used = 0
        if not self._free:
            self._retire()
        self._current = self._free.popleft()

    def _retire(self) -> None:
        transfer, buffer = self._live[0]
        transfer.result()
        self._live.popleft()
        self._free.append(buffer)

    def _reserve(self, needed: int) -> None:
        """Allocate ahead: writing beyond a file's end is slow, one write at a time."""
        if needed <= self._allocated:
            return
        step = min(max(self._allocated, SMALLEST_STEP), LARGEST_STEP)
        try:
            self._grow(max(needed, self._allocated + step))
        except NoSpaceError:
            self._grow(needed)

    def _grow(self, nbytes: int) -> None:
        # Opening preallocates; it is the one way that every engine has.
        self._engine.open(self._name, "r+", nbytes).close()
        self._allocated = nbytes

    def close(self) -> None:
        """Wait for what is under way and let go of the file; a second time does no harm."""
        for transfer, _ in self._live:
            transfer.cancel()
        for transfer, _ in self._live:
            transfer.exception()
        self._live.clear()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def as_bytes(data: Any) -> NDArray[np.uint8]:
    """Return the bytes of an object with the buffer protocol, without a copy."""
    view = memoryview(data)
    if view.nbytes == 0:
        return np.empty(0, np.uint8)
    return np.frombuffer(view.cast("B") if view.contiguous else bytes(view), np.uint8)
