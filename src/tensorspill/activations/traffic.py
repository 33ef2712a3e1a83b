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
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.transfer import Transfer
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
        Bytes that may be in memory only because they are being written.

    Attributes
    ----------
    dropped : deque of (str, int)
        Names and serials of ranges that nobody needs any more; `sweep` gives back their room.
    counts : dict of str to int
        What was done; see `ActivationStatistics`.
    clock : TransferClock
    """

    def __init__(self, file: SpillFile, pool: BufferPool, writing_limit: int) -> None:
        self.file = file
        self.pool = pool
        self.dropped: deque[tuple[str, int]] = deque()
        self.clock = TransferClock(_NAME)
        self.writing_bytes = self.most_writing_bytes = 0
        self.counts = dict.fromkeys(
            (
                "bytes_out",
                "bytes_in",
                "from_memory",
                "ahead",
                "awaited",
                "on_demand",
                "beyond_budget",
            ),
            0,
        )
        self._limit = writing_limit
        self._writes: deque[tuple[str, weakref.ref[StoredRange], Transfer]] = deque()
        self._serials: list[int] = []
        self._ranges: dict[int, weakref.ref[StoredRange]] = {}
        #: Names that were put; no transfer once that has ended, since its error refers to frames.
        self._puts: dict[str, Transfer | None] = {}
        self._error: BaseException | None = None
        #: Of so many writes under way an error is no news: others have failed with them.
        self._no_news = 0

    @property
    def live_bytes(self) -> int:
        """Bytes of ranges that are needed again."""
        return sum(one.nbytes for one in self._alive())

    # -- writing -------------------------------------------------------------------------------

    def write(self, one: StoredRange) -> None:
        """Begin to write a range; waits while too much is being written.

        Raises
        ------
        CapacityError, BrokenError
            It can't be written now, or an earlier write failed. What could not be written stays in
            memory as long as it is needed.
        """
        self.sweep()
        self._make_way(one.nbytes)
        self.raise_error()
        if one.memory is None:
            return
        with HeldInterrupts():
            transfer = self.file.put({one.name: one.memory})
            self._watch(one, transfer, written=True)
            self._puts[one.name] = transfer
            self._writes.append((one.name, weakref.ref(one), transfer))
            self._serials.append(one.serial)
            self._ranges[one.serial] = weakref.ref(one)
            self.writing_bytes += one.nbytes
            self.most_writing_bytes = max(self.most_writing_bytes, self.writing_bytes)

    def sweep(self) -> None:
        """Take note of writes that have ended, and give back the room of what is not needed."""
        while self._writes and self._writes[0][2].done():
            self._conclude_first_write()
        for _ in range(len(self.dropped)):
            name, serial = self.dropped.popleft()
            self._ranges.pop(serial, None)
            if name in self._puts:
                self._delete(name, serial)
        if len(self._serials) > 2 * len(self._ranges) + 64:
            self._serials = sorted(self._ranges)

    def raise_error(self) -> None:
        """Raise what made an earlier write fail, once."""
        error, self._error = self._error, None
        if error is not None:
            self._no_news = len(self._writes)
            raise error

    def _make_way(self, nbytes: int) -> None:
        while self._writes and self.writing_bytes + nbytes > self._limit:
            with self.clock.waiting():
                self._writes[0][2].exception()
            self._conclude_first_write()

    def _conclude_first_write(self) -> None:
        with HeldInterrupts():
            name, reference, transfer = self._writes.popleft()
            nbytes = transfer.nbytes
            self.writing_bytes -= nbytes
            if name in self._puts:
                self._puts[name] = None
            error, one = transfer.exception(0), reference()
            if error is None:
                self.counts["bytes_out"] += nbytes
            elif not self._no_news and not isinstance(error, CancelledError):
                self._error = self._error or error
            self._no_news = max(0, self._no_news - 1)
            if one is not None and one.transfer is transfer:
                one.transfer = None
                one.stored = error is None
                one.place = Place.HERE
                if one.stored:
                    self._let_go(one)

    def _delete(self, name: str, serial: int) -> None:
        transfer = self._puts[name]
        if transfer is not None and not transfer.done():  # deleting it now would wait
            transfer.cancel()
            self.dropped.append((name, serial))
            return
        del self._puts[name]
        if name in self.file:  # or its write failed
            self.file.delete(name)

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
            self._read(one, ahead=False)
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
        with HeldInterrupts():
            one.transfer = None
            if error is None:
                one.place = Place.HERE
                self.counts["bytes_in"] += one.nbytes
            else:
                self._let_go(one)
        return error

    def _look_ahead(self, one: StoredRange) -> None:
        for index in range(bisect.bisect_left(self._serials, one.serial) - 1, -1, -1):
            reference = self._ranges.get(self._serials[index])
            older = None if reference is None else reference()
            if older is None or older.place is not Place.AWAY:
                continue
            if not self._read(older, ahead=True):
                return

    def _read(self, one: StoredRange, *, ahead: bool) -> bool:
        """Begin to read a range; return whether there was memory for it."""
        alive = one.source.get()
        if alive is not None:  # others keep it
            one.memory, one.place = bytes_of(alive, one.begin, one.nbytes), Place.HERE
            return True
        memory = self._take(one.nbytes, ahead)
        if memory is None:
            return False
        with HeldInterrupts():
            transfer = self.file.get({one.name: memory})
            self._watch(one, transfer, written=False)
            one.memory, one.place = memory, Place.COMING
        return True

    def _take(self, nbytes: int, ahead: bool) -> torch.Tensor | None:
        """Return memory to read into; if need be, what was used before gives way."""
        while True:
            try:
                return self.pool.allocate((nbytes,), torch.uint8).tensor
            except CapacityError:
                if ahead:
                    return None
                if not self._give_way():
                    break
        self.counts["beyond_budget"] += nbytes
        return torch.empty(nbytes, dtype=torch.uint8, device=self.file.device)

    def _give_way(self) -> bool:
        """Let go the memory of a range: one that was used, else what is needed last."""
        held = [r for r in self._alive() if r.place is Place.HERE and r.stored]
        coming = [r for r in self._alive() if r.place is Place.COMING]
        for one in sorted(held, key=lambda r: (not r.used, r.serial)):
            self._let_go(one)
            return True
        for one in sorted(coming, key=lambda r: r.serial):
            if one.transfer is not None:
                one.transfer.cancel()
                one.transfer.exception()
            self._let_go(one)
            return True
        return False

    def _let_go(self, one: StoredRange) -> None:
        one.memory, one.transfer, one.place = None, None, Place.AWAY

    # -- both ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Wait for all writes."""
        while self._writes:
            with self.clock.waiting():
                self._writes[0][2].exception()
            self._conclude_first_write()

    def _alive(self) -> Iterator[StoredRange]:
        found = (reference() for reference in list(self._ranges.values()))
        return (one for one in found if one is not None)

    def _watch(self, one: StoredRange, transfer: Transfer, *, written: bool) -> None:
        one.transfer = transfer
        self.clock.watch(transfer)
        timeline.watch(transfer, _NAME, written=written)
