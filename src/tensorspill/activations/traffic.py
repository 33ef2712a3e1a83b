"""Ranges of memory on their way to the drive and back, within a budget of memory."""

from __future__ import annotations

import bisect
import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError

import torch

from tensorspill import timeline
from tensorspill.activations.stored import Place, StoredRange
from tensorspill.activations.watches import bytes_of
from tensorspill.activations.writing import WriteBehind
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.errors import CapacityError
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.residency.clock import TransferClock
from tensorspill.spill.file import SpillFile

__all__ = ["Traffic"]

_NAME = "activations"


class Traffic:
    """Writes ranges while forward goes on, and reads them back ahead of backward.

    Backward needs last what was saved first. So whenever it needs a range, those saved before it
    are read next, the youngest first, as far as there is memory. Not safe for concurrent use.

    Parameters
    ----------
    file : SpillFile
    pool : BufferPool
        Where ranges are read into.
    writing_limit : int
        Bytes that may be in memory without being on the drive.

    Attributes
    ----------
    dropped : deque of (str, int)
        Names and serials of ranges that nobody needs any more; `sweep` gives back their room.
    counts : dict of str to int
        What was done; see `ActivationStatistics`.
    clock : TransferClock
    writing : WriteBehind
    """

    def __init__(self, file: SpillFile, pool: BufferPool, writing_limit: int) -> None:
        self.file = file
        self.pool = pool
        self.dropped: deque[tuple[str, int]] = deque()
        self.clock = TransferClock(_NAME)
        self.writing = WriteBehind(file, self.clock, writing_limit)
        self.counts = dict.fromkeys(
            ("bytes_in", "from_memory", "ahead", "awaited", "on_demand", "beyond_budget"), 0
        )
        #: Fewer transfers cost the processor less. Of half the pool, backward waited for the drive
        #: where the budget holds only a few tensors.
        self._batch_bytes = pool.capacity // 4
        self._serials: list[int] = []
        self._ranges: dict[int, weakref.ref[StoredRange]] = {}

    @property
    def live_bytes(self) -> int:
        """Bytes of ranges that are needed again."""
        return sum(one.nbytes for one in self._alive())

    # -- writing -------------------------------------------------------------------------------

    def hold(self, one: StoredRange) -> None:
        """Keep a range until it is needed, in memory or on the drive (see `WriteBehind.hold`).

        Raises
        ------
        CapacityError, BrokenError
            Something can't be written now, or an earlier write failed. What could not be written
            stays in memory as long as it is needed.
        """
        self.sweep()
        self._serials.append(one.serial)
        self._ranges[one.serial] = weakref.ref(one)
        self.writing.hold(one)

    def sweep(self) -> None:
        """Take note of writes that have ended, and give back the room of what is not needed."""
        self.writing.note_ended()
        if self.dropped:
            with HeldInterrupts():
                self._forget_dropped()
        if len(self._serials) > 2 * len(self._ranges) + 64:
            self._serials = sorted(self._ranges)

    def _forget_dropped(self) -> None:
        for _ in range(len(self.dropped)):
            name, serial = self.dropped.popleft()
            self._ranges.pop(serial, None)
            if not self.writing.forget(name, serial):
                self.dropped.append((name, serial))

    # -- reading -------------------------------------------------------------------------------

    def bring(self, one: StoredRange) -> torch.Tensor:
        """Return the bytes of a range, and begin to read those that will be needed next.

        Raises
        ------
        BrokenError, CorruptError
            It could not be read; a later call tries again.
        """
        self.sweep()
        if one.place is Place.GOING and one.transfer is not None:
            one.transfer.cancel()  # backward has caught up with it
        ahead = one.place is Place.COMING
        if one.place is Place.AWAY:
            self.counts["on_demand"] += 1
            self._read_now(one)
        elif one.place is Place.COMING:
            self.counts["ahead" if one.transfer and one.transfer.done() else "awaited"] += 1
        else:
            self.counts["from_memory"] += 1
        self._look_ahead(one)
        error = self._finish_reading(one)
        one.used = True
        if error is not None and not ahead and not isinstance(error, CancelledError):
            raise error
        # What failed when it was read ahead, or was cancelled by a Ctrl-C, is read once more.
        return self.bring(one) if one.memory is None else one.memory

    def _finish_reading(self, one: StoredRange) -> BaseException | None:
        transfer = one.transfer
        if one.place is not Place.COMING or transfer is None:
            return None
        with self.clock.waiting():
            error = transfer.exception()
        # In this order an interrupt in between does no harm.
        if error is None:
            self.counts["bytes_in"] += one.nbytes
            one.place = Place.HERE
            one.transfer = None
        else:
            one.let_go()
        return error

    def _look_ahead(self, one: StoredRange) -> None:
        """Begin to read what is needed after a range, once there is memory for a batch of it."""
        if self.pool.statistics().free < self._batch_bytes:
            return
        batch: list[tuple[StoredRange, torch.Tensor]] = []
        nbytes = 0
        for older in self._older(one):
            if older.place is not Place.AWAY or self._is_kept_by_others(older):
                continue
            memory = self._take(older.nbytes, ahead=True)
            if memory is None:
                break
            batch.append((older, memory))
            nbytes += older.nbytes
            if nbytes >= self._batch_bytes:
                self._read(batch)
                batch, nbytes = [], 0
        if batch:
            self._read(batch)

    def _older(self, one: StoredRange) -> Iterator[StoredRange]:
        """Return the ranges that may be on the drive and are needed after this, next ones first."""
        oldest = self.writing.oldest
        serial = one.serial if oldest is None else min(one.serial, oldest)
        for index in range(bisect.bisect_left(self._serials, serial) - 1, -1, -1):
            reference = self._ranges.get(self._serials[index])
            older = None if reference is None else reference()
            if older is not None:
                yield older

    def _read_now(self, one: StoredRange) -> None:
        if self._is_kept_by_others(one):
            return
        memory = self._take(one.nbytes, ahead=False)
        if memory is None:
            memory = torch.empty(one.nbytes, dtype=torch.uint8, device=self.file.device)
            self.counts["beyond_budget"] += one.nbytes
        self._read([(one, memory)])

    def _is_kept_by_others(self, one: StoredRange) -> bool:
        alive = one.source.get()
        if alive is None:
            return False
        one.memory, one.place = bytes_of(alive, one.begin, one.nbytes), Place.HERE
        return True

    def _read(self, batch: list[tuple[StoredRange, torch.Tensor]]) -> None:
        """Begin to read ranges into memory, in one transfer."""
        with HeldInterrupts():
            transfer = self.file.get({one.name: memory for one, memory in batch})
            self.clock.watch(transfer)
            timeline.watch(transfer, _NAME, written=False)
            for one, memory in batch:
                one.memory, one.transfer, one.place = memory, transfer, Place.COMING

    def _take(self, nbytes: int, ahead: bool) -> torch.Tensor | None:
        """Return the pool's memory, if there is room; not ahead, what was used gives way to it."""
        while True:
            try:
                return self.pool.allocate((nbytes,), torch.uint8).tensor
            except CapacityError:
                if ahead or not self._give_way():
                    return None

    def _give_way(self) -> bool:
        """Let go the memory of a range: one that was used, else what is needed last."""
        held = [r for r in self._alive() if r.place is Place.HERE and r.stored]
        coming = [r for r in self._alive() if r.place is Place.COMING]
        for one in sorted(held, key=lambda r: (not r.used, r.serial)):
            one.let_go()
            return True
        for one in sorted(coming, key=lambda r: r.serial):
            if one.transfer is not None:
                one.transfer.cancel()
                one.transfer.exception()
            one.let_go()
            return True
        return False

    def _alive(self) -> Iterator[StoredRange]:
        found = (reference() for reference in list(self._ranges.values()))
        return (one for one in found if one is not None)
