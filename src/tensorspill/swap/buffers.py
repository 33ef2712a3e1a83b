"""Memory for a swapper's parameters: each gets a buffer of its own size, or all get none."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from tensorspill.errors import BusyError, CapacityError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.live import live_ranges
from tensorspill.pool.sizes import round_up

__all__ = ["UNIT", "SwapBuffers"]

#: What pools round the size of buffers up to, unless they were made otherwise.
UNIT = 4096


class Wanted(Protocol):
    """What a buffer is for."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        ...

    @property
    def shape(self) -> torch.Size:
        """Its shape."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Its dtype."""
        ...


class SwapBuffers:
    """Takes buffers from a pool for whole batches.

    From a pool that nobody else uses, buffers that come back are kept for the next parameter of
    the same size, since cutting one anew takes longer than the drive takes for 64 KiB. They are
    given up as soon as something else needs the room.

    Parameters
    ----------
    pool : BufferPool
    keep : bool
        Whether nobody else uses the pool.
    """

    def __init__(self, pool: BufferPool, keep: bool) -> None:
        self.pool = pool
        self._keep = keep
        self._lock = threading.Lock()
        self._idle: dict[int, list[Buffer]] = {}
        self._idle_bytes = 0
        #: Given back while somebody else's transfer still used them.
        self._busy: list[Buffer] = []

    @property
    def idle_bytes(self) -> int:
        """Bytes of the buffers that are kept, rounded up as the pool does."""
        return self._idle_bytes

    def take(self, wanted: Sequence[Wanted]) -> list[Buffer]:
        """Return a buffer for each size; its shape and dtype are those wanted if it is fresh.

        Raises
        ------
        CapacityError
            There is no room for all of them; nothing was taken.
        """
        with self._lock:
            self._sweep()
            try:
                return self._all(wanted)
            except CapacityError as error:
                asked = sum(one.nbytes for one in wanted)
                if not self._idle_bytes:
                    raise self._no_room(asked) from error
            # What was kept, or taken from it for this batch, may have split the free space.
            self._release_idle()
            try:
                return self._all(wanted)
            except CapacityError as error:
                raise self._no_room(asked) from error

    def give_back(self, buffers: Iterable[Buffer]) -> None:
        """Take buffers back; never raises and never waits for a transfer."""
        with self._lock:
            self._return(buffers)

    def release_idle(self) -> None:
        """Give the buffers that are kept to the pool."""
        with self._lock:
            self._sweep()
            self._release_idle()

    def _all(self, wanted: Sequence[Wanted]) -> list[Buffer]:
        taken: list[Buffer] = []
        try:
            for one in wanted:
                taken.append(self._one(one))  # noqa: PERF401 (kept if a later one fails)
        except BaseException:
            self._return(taken)
            raise
        return taken

    def _one(self, wanted: Wanted) -> Buffer:
        kept = self._idle.get(wanted.nbytes)
        if kept:
            self._idle_bytes -= round_up(wanted.nbytes, UNIT)
            return kept.pop()
        try:
            return self.pool.allocate(wanted.shape, wanted.dtype)
        except CapacityError:
            if not self._idle_bytes:
                raise
        self._release_idle()
        return self.pool.allocate(wanted.shape, wanted.dtype)

    def _return(self, buffers: Iterable[Buffer]) -> None:
        for buffer in buffers:
            if not self._keep:
                try:
                    buffer.release()
                except BusyError:
                    self._busy.append(buffer)
            elif live_ranges.overlap(buffer.address, buffer.nbytes):
                self._busy.append(buffer)
            else:
                self._idle.setdefault(buffer.nbytes, []).append(buffer)
                self._idle_bytes += round_up(buffer.nbytes, UNIT)

    def _sweep(self) -> None:
        if self._busy:
            busy, self._busy = self._busy, []
            self._return(busy)

    def _release_idle(self) -> None:
        for kept in self._idle.values():
            for buffer in kept:
                buffer.release()
        self._idle.clear()
        self._idle_bytes = 0

    def _no_room(self, asked: int) -> CapacityError:
        if self._idle_bytes:
            self._release_idle()
        state = self.pool.statistics()
        return CapacityError(
            "The swapper has no memory for this batch",
            asked=asked,
            free=state.free,
            largest=state.largest,
            remedy="Swap out or release parameters, or give the swapper a larger budget",
        )
