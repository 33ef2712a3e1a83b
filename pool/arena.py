"""What pools, buffers and reservations share: the memory, who has which part, and the lock."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from tensorspill.errors import BusyError, CapacityError, ClosedError
from tensorspill.pool.allocator import ExtentAllocator
from tensorspill.pool.buffer import Buffer, Memory
from tensorspill.pool.live import live_ranges
from tensorspill.pool.sizes import round_up

__all__ = ["AnySlab", "Arena", "PoolStatistics"]

#: A byte that makes a NaN in every float type but the float8 "fnuz" ones.
_POISON = 0xFF

#: Longest wait for a notice; buffers dropped without release can't always give one.
_LOOK_AGAIN = 0.05

_REMEDY = "Release buffers, or make the pool larger"


@dataclass(frozen=True, slots=True)
class PoolStatistics:
    """The state of a pool, in bytes of whole units of alignment.

    Attributes
    ----------
    capacity : int
        ``allocated + reserved + free``.
    allocated, reserved, free : int
        In buffers; in reservations and not yet in buffers; neither.
    largest : int
        The largest buffer that could be allocated now.
    buffers : int
        Buffers that hold memory.
    peak_allocated : int
        The most that was ever allocated at once.
    waits : int
        Allocations that had to wait for others to release.
    """

    capacity: int
    allocated: int
    reserved: int
    free: int
    largest: int
    buffers: int
    peak_allocated: int
    waits: int


class AnySlab(Protocol):
    """What an arena needs of its memory, wherever that is.

    Attributes
    ----------
    address, nbytes : int
        The range.
    device : torch.device
        Where it is.
    """

    address: int
    nbytes: int
    device: torch.device

    def part(self, offset: int, nbytes: int) -> Memory:
        """Return a range that keeps the memory until nothing refers to it any more."""
        ...

    def shaped(
        self, part: Memory, shape: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor | None:
        """Return a tensor over exactly `part`, whose storage holds `part`; None if torch can't."""
        ...

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set bytes."""
        ...

    def close(self) -> None:
        """Give up the memory, which stays while parts of it are in use."""
        ...


class Arena:
    """A slab and the extents in it.

    Who calls a method named with "locked" holds `changed`; the others take it.

    Attributes
    ----------
    changed : Condition
        The lock; notified whenever memory became free.
    """

    def __init__(self, slab: AnySlab, allocator: ExtentAllocator, poison: bool) -> None:
        self.slab = slab
        self.allocator = allocator
        # No reentrant lock: `drop` may run in the middle of any of our own lines.
        self.changed = threading.Condition(threading.Lock())
        self.pieces: set[int] = set()
        self.closed = False
        self._poison = poison
        if poison:
            slab.fill(0, slab.nbytes, _POISON)
        self._dropped: deque[int] = deque()
        self._reserved = self._peak = self._waits = 0
        self._pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the pool."""
        return os.getpid() != self._pid

    def check_open(self) -> None:
        """Raise `ClosedError` unless buffers may be allocated."""
        if self.closed:
            raise ClosedError("The pool is closed")
        self.check_process()

    def check_process(self) -> None:
        """Raise `ClosedError` in a child, where nobody may ever let go of the lock."""
        if self.forked:
            raise ClosedError(
                "The pool belongs to the parent process", remedy="Make one in this process"
            )

    # -- buffers -------------------------------------------------------------------------------

    def extent_locked(self, nbytes: int, block: bool, timeout: float | None) -> int:
        """Return the offset of a new extent, waiting for it if asked to."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waited = False
        while True:
            self.check_open()
            self._reclaim_locked()
            try:
                return self.allocator.allocate(nbytes)
            except CapacityError as error:
                pause = _LOOK_AGAIN if deadline is None else deadline - time.monotonic()
                if not block or pause <= 0 or nbytes > self.allocator.capacity:
                    error.remedy = _REMEDY
                    raise
            self._waits += not waited
            waited = True
            self.changed.wait(min(pause, _LOOK_AGAIN))

    def buffer_locked(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int
    ) -> Buffer:
        """Make the buffer over an extent; free the extent if that fails."""
        try:
            memory = self.slab.part(offset, nbytes)
            tensor = self.slab.shaped(memory, shape, dtype)
            # The storage owns `memory`, so this is called when no tensor uses it any more.
            returning = weakref.finalize(memory, self.drop, (offset,))
            returning.atexit = False
        except BaseException:
            self._free_locked(offset)
            raise
        self._peak = max(self._peak, self.allocator.allocated - self._reserved)
        layout = (shape, dtype, self.slab.device)
        address = self.slab.address + offset
        return Buffer(memory, layout, address, tensor, self, offset, returning)

    def empty_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> Buffer:
        """Make a buffer without elements, which takes no memory."""
        nothing = self.slab.part(0, 0)
        tensor = self.slab.shaped(nothing, shape, dtype)
        return Buffer(nothing, (shape, dtype, self.slab.device), 0, tensor, self, None, None)

    def take_back(self, offset: int) -> None:
        """Free the extent of a released buffer."""
        with self.changed:
            self._free_locked(offset)
            self.changed.notify_all()

    def drop(self, offsets: Iterable[int]) -> None:
        """Note extents that nobody uses any more; called by the garbage collector, anywhere.

        It may interrupt a thread that has the lock, and so must not wait for it.
        """
        self._dropped.extend(offsets)
        if not self.forked and self.changed.acquire(blocking=False):
            try:
                self._reclaim_locked()
                self.changed.notify_all()
            finally:
                self.changed.release()

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, sizes: Sequence[int], scattered: bool) -> list[int]:
        """Reserve an extent for each size, or for parts of it; all or nothing."""
        self.check_open()
        with self.changed:
            self.check_open()
            self._reclaim_locked()
            offsets = self._pieces_locked(sizes, scattered)
            self.pieces.update(offsets)
            self._reserved += sum(map(self.allocator.size_of, offsets))
        return offsets

    def carve_locked(self, pieces: list[int], nbytes: int) -> int:
        """Take an extent out of the smallest of a reservation's pieces that fits."""
        size_of = self.allocator.size_of
        offset = min((p for p in pieces if size_of(p) >= nbytes), key=size_of, default=None)
        if offset is None:
            raise CapacityError(
                "The reservation has no room",
                asked=nbytes,
                free=sum(map(size_of, pieces)),
                largest=max(map(size_of, pieces), default=0),
            )
        rest = self.allocator.split(offset, nbytes)
        pieces.remove(offset)
        self.pieces.remove(offset)
        self._reserved -= size_of(offset)
        if rest is not None:
            pieces.append(rest)
            self.pieces.add(rest)
        return offset

    def give_back_locked(self, pieces: list[int]) -> None:
        """Free what a reservation still has."""
        while pieces:
            self._free_locked(pieces.pop())
        self.changed.notify_all()

    def _pieces_locked(self, sizes: Sequence[int], scattered: bool) -> list[int]:
        allocator, taken = self.allocator, list[int]()
        try:
            for size in sorted(filter(None, sizes), reverse=True):
                left = round_up(size, allocator.alignment)
                while left > 0:
                    part = min(left, allocator.largest) if scattered else left
                    taken.append(allocator.allocate(part or left))
                    left -= part
        except CapacityError as error:
            for offset in taken:
                allocator.free(offset)
            raise CapacityError(
                "No room for this reservation",
                asked=sum(sizes),
                free=allocator.free_bytes,
                largest=allocator.largest,
                remedy=_REMEDY,
            ) from error
        return taken

    # -- accounts and the end --------------------------------------------------------------------

    def statistics(self) -> PoolStatistics:
        """Return the state; see `BufferPool.statistics`."""
        self.check_process()
        with self.changed:
            self._reclaim_locked()
            return PoolStatistics(
                capacity=self.allocator.capacity,
                allocated=self.allocator.allocated - self._reserved,
                reserved=self._reserved,
                free=self.allocator.free_bytes,
                largest=self.allocator.largest,
                buffers=len(self.allocator) - len(self.pieces),
                peak_allocated=self._peak,
                waits=self._waits,
            )

    def close(self) -> None:
        """Give up the memory; see `BufferPool.close`."""
        if self.closed or self.forked:
            return
        if live_ranges.overlap(self.slab.address, self.slab.nbytes):
            raise BusyError(
                "A transfer uses this pool", remedy="Wait for it before closing the pool"
            )
        with self.changed:
            self.closed = True
            self.changed.notify_all()
        self.slab.close()

    def _free_locked(self, offset: int) -> None:
        size = self.allocator.size_of(offset)
        if self._poison and not self.closed:
            self.slab.fill(offset, size, _POISON)
        if offset in self.pieces:
            self.pieces.remove(offset)
            self._reserved -= size
        self.allocator.free(offset)

    def _reclaim_locked(self) -> None:
        """Free what was dropped without being released."""
        while self._dropped:
            self._free_locked(self._dropped.popleft())
