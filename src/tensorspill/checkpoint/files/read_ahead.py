"""A file that is read ahead of whoever goes through it."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tensorspill.engine.engine import Engine
from tensorspill.engine.request import Request
from tensorspill.engine.transfer import Transfer
from tensorspill.pool.slab import Slab

__all__ = ["ReadAhead"]


class _Block(NamedTuple):
    transfer: Transfer
    memory: NDArray[np.uint8]


class ReadAhead:
    """Keeps the blocks that come next under way, and reads large ranges where they belong.

    Parameters
    ----------
    engine : Engine
        For host memory.
    name : str
        Of a file in the engine's folder.
    buffer_bytes : int
        Of each block; a multiple of 4096.
    buffers : int
        Two at least.

    Attributes
    ----------
    size : int
        Bytes of the file.
    """

    def __init__(self, engine: Engine, name: str, buffer_bytes: int, buffers: int) -> None:
        self._engine = engine
        self._file = engine.open(name, "r")
        self.size = self._file.size
        self._nbytes = buffer_bytes
        self._slab = Slab(buffers * buffer_bytes, page_lock="no")
        memory = self._slab.array
        self._free = [
            memory[start : start + buffer_bytes] for start in range(0, memory.size, buffer_bytes)
        ]
        self._ahead = buffers - 1
        #: By number, the least recently used first.
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self._last = -1

    def read(self, position: int, out: NDArray[np.uint8]) -> int:
        """Read from `position` on; return how many bytes there were, all but at the end.

        Raises
        ------
        BrokenError
            The file can't be read; `EndOfFileError` if it became shorter.
        """
        stop = min(position + out.size, self.size)
        done = position
        while done < stop:
            number = done // self._nbytes
            if number not in self._blocks and stop - done >= self._nbytes:
                # Nothing is gained by a copy.
                end = self._known_from(number, stop)
                self._straight(done, out[done - position : end - position])
                done = end
                continue
            memory = self._block(number)
            start = done - number * self._nbytes
            part = min(stop - done, self._nbytes - start)
            np.copyto(out[done - position : done - position + part], memory[start : start + part])
            done += part
        return max(stop - position, 0)

    def _known_from(self, number: int, stop: int) -> int:
        """Return where the first block begins that is under way, or `stop`."""
        later = (n * self._nbytes for n in self._blocks if n > number)
        return min((start for start in later if start < stop), default=stop)

    def _straight(self, offset: int, out: NDArray[np.uint8]) -> None:
        transfer = self._engine.submit([Request(out, self._file, offset)])
        # What follows keeps the drive at work while the caller deals with this.
        self._last = (offset + out.size - 1) // self._nbytes
        self._look_ahead(self._last)
        transfer.result()

    def _block(self, number: int) -> NDArray[np.uint8]:
        """Return a block's bytes; keep those after it under way if the reader is going on."""
        if number not in self._blocks:
            self._request(number, keep=number)
        self._blocks.move_to_end(number)
        if number in (self._last, self._last + 1):
            self._look_ahead(number)
        self._last = number
        transfer, memory = self._blocks[number]
        transfer.result()
        return memory

    def _look_ahead(self, number: int) -> None:
        for following in range(number + 1, number + 1 + self._ahead):
            if following * self._nbytes >= self.size:
                break
            if following not in self._blocks:
                self._request(following, keep=number)

    def _request(self, number: int, keep: int) -> None:
        if not self._free:
            oldest = next(n for n in self._blocks if n != keep)
            transfer, memory = self._blocks.pop(oldest)
            # Whatever came of it, nobody asked.
            transfer.exception()
            self._free.append(memory)
        memory = self._free.pop()
        offset = number * self._nbytes
        nbytes = min(self._nbytes, self.size - offset)
        try:
            transfer = self._engine.submit([Request(memory, self._file, offset, nbytes)])
        except BaseException:
            self._free.append(memory)
            raise
        self._blocks[number] = _Block(transfer, memory)

    def close(self) -> None:
        """Wait for what is under way and let go of the file; a second time does no harm."""
        for block in self._blocks.values():
            block.transfer.cancel()
        for block in self._blocks.values():
            block.transfer.exception()
        self._blocks.clear()
        self._file.close()
