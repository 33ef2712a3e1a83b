"""A pool of buffers of any size, cut from one slab."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.errors import BusyError, CapacityError, ClosedError, UnsupportedError
from tensorspill.pool.allocator import ExtentAllocator
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.live import live_ranges
from tensorspill.pool.reservation import Reservation
from tensorspill.pool.shapes import Shape, count_bytes, normal_shape, shaped
from tensorspill.pool.sizes import parse_bytes, round_up
from tensorspill.pool.slab import PageLocking, Slab

__all__ = ["BufferPool", "PoolStatistics"]

#: A byte that makes a NaN in every float type but the float8 "fnuz" ones.
_POISON = 0xFF

#: Longest wait for a notice; buffers dropped without release can't always give one.
_LOOK_AGAIN = 0.05


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


class BufferPool:
    """Host memory, taken once, from which buffers of any size are cut.

    All methods may be called from any thread. A forked child has the memory's content at the time
    of the fork, but can't allocate.

    Parameters
    ----------
    nbytes : int or str
        Capacity in bytes, or text such as "4GiB"; rounded up to the alignment.
    device : str or torch.device
        "cpu": GPU memory is not in this version.
    alignment : int
        Power of two from 64 to 2 MiB; every buffer's address and room are multiples of it.
    numa_node : int, optional
        Take the memory from this NUMA node.
    page_lock : {"auto", "yes", "no"}
        See `Slab`.
    allocator : ExtentAllocator, optional
        Decides where in the memory buffers go; unused so far, with at most `nbytes` of capacity.
        Its alignment then counts.
    poison : bool
        Keep memory that is in no buffer filled with 0xFF, a NaN in nearly all float types, so
        that use after release, or before writing, shows. For tests.

    Attributes
    ----------
    device : torch.device
        Where the memory is.
    slab : Slab
        The memory, with its address, page-locking and notes.

    Raises
    ------
    UnsupportedError
        An argument is out of range.
    BrokenError
        The operating system has no such memory.
    """

    def __init__(
        self,
        nbytes: int | str,
        device: str | torch.device = "cpu",
        *,
        alignment: int = 4096,
        numa_node: int | None = None,
        page_lock: PageLocking = "auto",
        allocator: ExtentAllocator | None = None,
        poison: bool = False,
    ) -> None:
        self.device = _host_device(device)
        size = parse_bytes(nbytes)
        if allocator is None:
            allocator = ExtentAllocator(round_up(size, max(alignment, 1)), alignment)
        elif len(allocator) or allocator.capacity > size:
            raise UnsupportedError("The allocator is in use, or has more capacity than the pool")
        if allocator.alignment < 64:
            raise UnsupportedError(f"Buffers need an alignment of 64, not {allocator.alignment}")
        self.slab = Slab(
            allocator.capacity,
            numa_node=numa_node,
            page_lock=page_lock,
            alignment=allocator.alignment,
        )
        self._memory: NDArray[np.uint8] = self.slab.array
        self._poison = poison
        if poison:
            self._memory.fill(_POISON)
        self._allocator = allocator
        # No reentrant lock: `_drop` may run in the middle of any of our own lines.
        self._changed = threading.Condition(threading.Lock())
        self._dropped: deque[int] = deque()
        self._pieces: set[int] = set()
        self._reserved = self._peak = self._waits = 0
        self._closed = False
        self._pid = os.getpid()

    # -- what users call -----------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the pool."""
        return os.getpid() != self._pid

    @property
    def capacity(self) -> int:
        """Bytes of the pool."""
        return self._allocator.capacity

    def allocate(
        self,
        shape: Shape,
        dtype: torch.dtype = torch.uint8,
        *,
        block: bool = False,
        timeout: float | None = None,
    ) -> Buffer:
        """Return a buffer that nobody else has; its content is undefined.

        Parameters
        ----------
        shape : int or sequence of int
            Any shape; one without elements takes no memory.
        dtype : torch.dtype
            Any dtype.
        block : bool
            Wait until others have released enough. Who waits is not served in order: whatever
            fits is taken.
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        CapacityError
            There is no room: now, or within `timeout`, or ever. Nothing changed.
        UnsupportedError
            The shape or the dtype is not possible.
        ClosedError
            The pool was closed, perhaps while this call waited, or this is a forked child.
        """
        sizes = normal_shape(shape)
        nbytes = count_bytes(sizes, dtype)
        self._check_open()
        if nbytes == 0:
            return Buffer(shaped(self._memory[:0], sizes, dtype), self, None, None)
        with self._changed:
            offset = self._wait_for(nbytes, block, timeout)
            return self._buffer(offset, sizes, dtype, nbytes)

    def reserve(self, nbytes: int | str | Iterable[int]) -> Reservation:
        """Take free space out of the reach of others, so that several buffers can be planned.

        Parameters
        ----------
        nbytes : int, str or iterable of int
            The sizes of the buffers to come: there will be room for each of them. One size is
            taken in one piece where there is such a hole, else in several, the largest first.

        Raises
        ------
        CapacityError
            There is no room; nothing changed.
        UnsupportedError
            A size is negative or no size.
        ClosedError
            The pool was closed, or this is a forked child.
        """
        if isinstance(nbytes, Iterable) and not isinstance(nbytes, str):
            sizes, scattered = [parse_bytes(size) for size in nbytes], False
        else:
            sizes, scattered = [parse_bytes(nbytes)], True
        self._check_open()
        with self._changed:
            self._check_open()
            self._reclaim()
            offsets = self._take_pieces(sizes, scattered)
            self._pieces.update(offsets)
            self._reserved += sum(map(self._allocator.size_of, offsets))
        return Reservation(self, offsets)

    def statistics(self) -> PoolStatistics:
        """Return the pool's state; works after `close` as well.

        Raises
        ------
        ClosedError
            This is a forked child.
        """
        self._check_process()
        with self._changed:
            self._reclaim()
            allocator = self._allocator
            return PoolStatistics(
                capacity=allocator.capacity,
                allocated=allocator.allocated - self._reserved,
                reserved=self._reserved,
                free=allocator.free_bytes,
                largest=allocator.largest,
                buffers=len(allocator) - len(self._pieces),
                peak_allocated=self._peak,
                waits=self._waits,
            )

    def close(self) -> None:
        """Give up the memory; a second time does no harm.

        Buffers count as released from now on, and those who wait for one get a `ClosedError`.
        The memory stays valid, and page-locked no more, while tensors use it.

        Raises
        ------
        BusyError
            A transfer that has not ended uses the pool's memory; the pool stays open.
        """
        if self._closed or self.forked:
            return
        if live_ranges.overlap(self.slab.address, self.slab.nbytes):
            raise BusyError(
                "A transfer uses this pool", remedy="Wait for it before closing the pool"
            )
        with self._changed:
            self._closed = True
            self._memory = self._memory[:0].copy()
            self._changed.notify_all()
        self.slab.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else repr(self._allocator)
        return f"<BufferPool on {self.device}: {state}>"

    # -- what holds the lock ---------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The pool is closed")
        self._check_process()

    def _check_process(self) -> None:
        # The lock may have been held by a thread that the child does not have.
        if self.forked:
            raise ClosedError(
                "The pool belongs to the parent process", remedy="Make one in this process"
            )

    def _wait_for(self, nbytes: int, block: bool, timeout: float | None) -> int:
        """Return the offset of a new extent, waiting for it if asked to."""
        deadline = None if timeout is None else time.monotonic() + timeout
        waited = False
        while True:
            self._check_open()
            self._reclaim()
            try:
                return self._allocator.allocate(nbytes)
            except CapacityError as error:
                pause = _LOOK_AGAIN if deadline is None else deadline - time.monotonic()
                if not block or pause <= 0 or nbytes > self.capacity:
                    error.remedy = "Release buffers, or make the pool larger"
                    raise
            self._waits += not waited
            waited = True
            self._changed.wait(min(pause, _LOOK_AGAIN))

    def _buffer(
        self, offset: int, shape: tuple[int, ...], dtype: torch.dtype, nbytes: int
    ) -> Buffer:
        """Make the buffer over an extent; free the extent if that fails."""
        try:
            memory = self._memory[offset : offset + nbytes]
            tensor = shaped(memory, shape, dtype)
            # The storage owns `memory`, so this is called when no tensor uses it any more.
            returning = weakref.finalize(memory, self._drop, (offset,))
            returning.atexit = False
        except BaseException:
            self._free(offset)
            raise
        self._peak = max(self._peak, self._allocator.allocated - self._reserved)
        return Buffer(tensor, self, offset, returning)

    def _take_pieces(self, sizes: Sequence[int], scattered: bool) -> list[int]:
        """Allocate an extent for each size, or for parts of it; all or nothing."""
        allocator, taken = self._allocator, list[int]()
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
                remedy="Release buffers, or make the pool larger",
            ) from error
        return taken

    def _carve(self, pieces: list[int], nbytes: int) -> int:
        """Move the smallest of reserved pieces that fits out of the reservation; see `_buffer`."""
        size_of = self._allocator.size_of
        offset = min((p for p in pieces if size_of(p) >= nbytes), key=size_of, default=None)
        if offset is None:
            raise CapacityError(
                "The reservation has no room",
                asked=nbytes,
                free=sum(map(size_of, pieces)),
                largest=max(map(size_of, pieces), default=0),
            )
        rest = self._allocator.split(offset, nbytes)
        pieces.remove(offset)
        self._pieces.remove(offset)
        self._reserved -= size_of(offset)
        if rest is not None:
            pieces.append(rest)
            self._pieces.add(rest)
        return offset

    def _free(self, offset: int) -> None:
        size = self._allocator.size_of(offset)
        if self._poison and not self._closed:
            self._memory[offset : offset + size].fill(_POISON)
        if offset in self._pieces:
            self._pieces.remove(offset)
            self._reserved -= size
        self._allocator.free(offset)

    def _reclaim(self) -> None:
        """Free what was dropped without being released."""
        while self._dropped:
            self._free(self._dropped.popleft())

    def _give_back(self, pieces: list[int]) -> None:
        """Free what a reservation still has."""
        while pieces:
            self._free(pieces.pop())
        self._changed.notify_all()

    # -- what others call ------------------------------------------------------------------------

    def _take_back(self, offset: int) -> None:
        """Free the extent of a released buffer."""
        with self._changed:
            self._free(offset)
            self._changed.notify_all()

    def _drop(self, offsets: Iterable[int]) -> None:
        """Note extents that nobody uses any more; called by the garbage collector, anywhere.

        It may interrupt a thread that has the lock, and so must not wait for it.
        """
        self._dropped.extend(offsets)
        if not self.forked and self._changed.acquire(blocking=False):
            try:
                self._reclaim()
                self._changed.notify_all()
            finally:
                self._changed.release()


def _host_device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedError(f"{device!r} is no device: {error}") from error
    if device.type == "cuda":
        raise UnsupportedError(
            "Pools of GPU memory are not in this version", remedy='Use device="cpu"'
        )
    if device.type != "cpu":
        raise UnsupportedError(f"No pools on {device}")
    return device
