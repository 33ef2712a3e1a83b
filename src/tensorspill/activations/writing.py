"""Ranges of memory that the drive does not have yet: the youngest wait, the oldest are written."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import NamedTuple

from tensorspill import timeline
from tensorspill.activations.stored import Place, StoredRange
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.transfer import Transfer
from tensorspill.residency.clock import TransferClock
from tensorspill.spill.file import SpillFile

__all__ = ["WriteBehind"]


class _Waiting(NamedTuple):
    """A range that is in memory only, with its size for when it is gone."""

    reference: weakref.ref[StoredRange]
    nbytes: int


class _Write(NamedTuple):
    """Ranges that are written together."""

    names: tuple[str, ...]
    references: tuple[weakref.ref[StoredRange], ...]
    nbytes: int
    transfer: Transfer


class WriteBehind:
    """Keeps in memory what backward needs first, and writes what no longer fits beside it.

    What was saved last is needed first, so it is not written before younger ranges need its place.
    Several small ranges are written together, since each transfer costs the processor some time.
    Not safe for concurrent use.

    Parameters
    ----------
    file : SpillFile
    clock : TransferClock
    limit : int
        Bytes that may be in memory without being on the drive, in all.

    Attributes
    ----------
    held_bytes, most_held_bytes : int
        Bytes in memory that the drive does not have: now, and the most there were at once.
    bytes_out : int
        Bytes written.
    """

    def __init__(self, file: SpillFile, clock: TransferClock, limit: int) -> None:
        self.held_bytes = self.most_held_bytes = self.bytes_out = 0
        self._file = file
        self._clock = clock
        self._limit = limit
        #: Room for writes under way, which is a batch: meanwhile forward fills its place.
        self._margin = limit // 8
        #: By serial, the oldest first.
        self._waiting: dict[int, _Waiting] = {}
        self._waiting_bytes = 0
        self._writes: deque[_Write] = deque()
        #: Names that were put; no transfer once that has ended, since its error refers to frames.
        self._puts: dict[str, Transfer | None] = {}
        self._error: BaseException | None = None
        #: Of so many writes under way an error is no news: others have failed with them.
        self._no_news = 0

    @property
    def oldest(self) -> int | None:
        """The serial from which on ranges are in memory, if any wait to be written."""
        return next(iter(self._waiting), None)

    @property
    def idle(self) -> bool:
        """Whether nothing waits, nothing is being written, and no name is stored."""
        return not (self._waiting or self._writes or self._puts or self.held_bytes)

    # -- writing -------------------------------------------------------------------------------

    def hold(self, one: StoredRange) -> None:
        """Keep a range in memory, and write the oldest; waits while too much is in memory.

        Raises
        ------
        CapacityError, BrokenError
            Something can't be written now, or an earlier write failed. It stays in memory as long
            as it is needed; the given range was not taken.
        """
        self._margin = min(max(self._margin, 2 * one.nbytes), self._limit // 2)
        self._write_beyond(self._limit - self._margin - one.nbytes)
        while self._writes and self.held_bytes + one.nbytes > self._limit:
            self._await_first()
        self.raise_error()
        with HeldInterrupts():
            self._waiting[one.serial] = _Waiting(weakref.ref(one), one.nbytes)
            self._waiting_bytes += one.nbytes
            self.held_bytes += one.nbytes
            self.most_held_bytes = max(self.most_held_bytes, self.held_bytes)
        self._write_beyond(self._limit - self._margin)  # one that is larger than all that may wait

    def raise_error(self) -> None:
        """Raise what made an earlier write fail, once."""
        error, self._error = self._error, None
        if error is not None:
            self._no_news = len(self._writes)
            raise error

    def finish(self) -> None:
        """Write all that waits, and wait for it."""
        self._write_beyond(0)
        while self._writes:
            self._await_first()

    def _write_beyond(self, room: int) -> None:
        """Begin to write the oldest ranges until the others fit into some room."""
        while self._waiting and self._waiting_bytes > room:
            chosen = self._oldest_batch()
            if chosen:
                self._write(chosen)

    def _oldest_batch(self) -> list[StoredRange]:
        """Return the oldest ranges that are worth a transfer, and forget those that are gone."""
        chosen: list[StoredRange] = []
        gone: list[int] = []
        nbytes = 0
        for serial, waiting in self._waiting.items():
            one = waiting.reference()
            if one is None or not one.in_place:
                gone.append(serial)
                continue
            if chosen and nbytes + one.nbytes > self._margin:
                break
            chosen.append(one)
            nbytes += one.nbytes
        if gone:
            with HeldInterrupts():
                self.held_bytes -= sum(map(self._take_out, gone))
        return chosen

    def _write(self, chosen: list[StoredRange]) -> None:
        with HeldInterrupts():
            transfer = self._file.put({r.name: r.memory for r in chosen if r.memory is not None})
            self._clock.watch(transfer)
            timeline.watch(transfer, "activations", written=True)
            for one in chosen:
                self._take_out(one.serial)
                self._puts[one.name] = one.transfer = transfer
                one.place = Place.GOING
            names = tuple(one.name for one in chosen)
            nbytes = sum(one.nbytes for one in chosen)
            self._writes.append(_Write(names, tuple(map(weakref.ref, chosen)), nbytes, transfer))

    def _take_out(self, serial: int) -> int:
        """Let a range wait no longer; return its bytes, 0 if it did not wait."""
        waiting = self._waiting.pop(serial, None)
        nbytes = 0 if waiting is None else waiting.nbytes
        self._waiting_bytes -= nbytes
        return nbytes

    # -- what has ended ------------------------------------------------------------------------

    def note_ended(self) -> None:
        """Take note of writes that have ended."""
        while self._writes and self._writes[0].transfer.done():
            self._conclude_first()

    def _await_first(self) -> None:
        with self._clock.waiting():
            self._writes[0].transfer.exception()
        self._conclude_first()

    def _conclude_first(self) -> None:
        with HeldInterrupts():
            names, references, nbytes, transfer = self._writes.popleft()
            self.held_bytes -= nbytes
            for name in names:
                if name in self._puts:
                    self._puts[name] = None
            error = transfer.exception(0)
            if error is None:
                self.bytes_out += nbytes
            elif not self._no_news and not isinstance(error, CancelledError):
                self._error = self._error or error
            self._no_news = max(0, self._no_news - 1)
            for one in _alive(references):
                if one.transfer is transfer:
                    self._settle(one, error)

    def _settle(self, one: StoredRange, error: BaseException | None) -> None:
        one.transfer = None
        one.place = Place.HERE
        if error is None:
            one.stored = True
            one.let_go()
        elif isinstance(error, CancelledError):  # because of another one of its batch, perhaps
            self._puts.pop(one.name, None)
            self._waiting[one.serial] = _Waiting(weakref.ref(one), one.nbytes)
            self._waiting = dict(sorted(self._waiting.items()))
            self._waiting_bytes += one.nbytes
            self.held_bytes += one.nbytes

    def forget(self, name: str, serial: int) -> bool:
        """Give back the room of a range that nobody needs; False if that has to wait."""
        self.held_bytes -= self._take_out(serial)
        if name not in self._puts:
            return True
        transfer = self._puts[name]
        if transfer is not None and not transfer.done():  # deleting it now would wait
            transfer.cancel()
            return False
        del self._puts[name]
        if name in self._file:  # or its write failed
            self._file.delete(name)
        return True


def _alive(references: tuple[weakref.ref[StoredRange], ...]) -> Iterator[StoredRange]:
    found = (reference() for reference in references)
    return (one for one in found if one is not None)
