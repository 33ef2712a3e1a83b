"""Bytes that are moved while something else is computed, by nothing but the engine."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.spill.file import SpillFile

__all__ = ["Mover", "stolen_seconds"]

_PIECE = 16 << 20
_PIECES = 16
_BUFFERS = 4


class Mover:
    """Reads and writes large pieces of a spill file, two at a time, in another thread.

    Parameters
    ----------
    folder : Path
    """

    def __init__(self, folder: Path) -> None:
        self._file = SpillFile(folder, capacity=2 * _PIECES * _PIECE)
        self._pool = BufferPool(_BUFFERS * _PIECE)
        self._buffers = [self._pool.allocate(_PIECE, torch.uint8) for _ in range(_BUFFERS)]
        for number in range(_PIECES):
            self._file.put({str(number): self._buffers[0]}).result()

    @contextmanager
    def moving(self, bytes_read: int, bytes_written: int) -> Iterator[None]:
        """Return a context that ends when so many bytes have been moved beside what is in it."""
        thread = threading.Thread(target=self._move, args=(bytes_read, bytes_written))
        thread.start()
        try:
            yield
        finally:
            thread.join()

    def close(self) -> None:
        """Give everything back."""
        self._file.close()
        for buffer in self._buffers:
            buffer.release()
        self._pool.close()

    def _move(self, bytes_read: int, bytes_written: int) -> None:
        writes = bytes_written // _PIECE
        count = bytes_read // _PIECE + writes
        under_way = []
        for number in range(count):
            if len(under_way) == 2:
                under_way.pop(0).result()
            piece = {str(number % _PIECES): self._buffers[number % _BUFFERS]}
            # Mixed evenly.
            written = (number + 1) * writes // count > number * writes // count
            under_way.append(self._file.put(piece) if written else self._file.get(piece))
        for transfer in under_way:
            transfer.result()


def stolen_seconds() -> float:
    """Return for how long this machine's CPUs were not given to it, since it was started.

    On a virtual machine the host may serve its drive by what would be its CPUs' time.
    """
    with open("/proc/stat") as file:
        ticks = int(file.readline().split()[8])
    return ticks / 100
