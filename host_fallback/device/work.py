"""A transfer under way: what is left to start of it, what is in flight, and how it ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, cast

import numpy as np

from tensorspill.engine.batch import REQUEST, Batch
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.statistics import PathStatistics, TransferRecord
from tensorspill.engine.transfer import Transfer
from tensorspill.host_fallback.device.arrange import PIECE, RUN, arrange, bound
from tensorspill.host_fallback.device.file import StagedFile

__all__ = ["PREFIX", "Flight", "Leg", "Work"]

#: What the names of paths begin with: all bytes go through staging blocks, then on as named.
PREFIX = "staged-device/"

Table = np.ndarray[Any, Any]


class Work:
    """A transfer; everything but `stop` is called by the engine's thread alone.

    Attributes
    ----------
    ready : bool
        Whether the caller's stream was seen to have come to where the memory may be touched.
    flights : set of Flight
        What is under way.
    legs : list of Leg
        The reads, the writes, or both.
    """

    def __init__(
        self, ledger: Ledger, batch: Batch, transfer: Transfer, wake: Callable[[], None]
    ) -> None:
        self.batch = batch
        self.transfer = transfer
        self._ledger = ledger
        self._wake = wake
        self._mark = transfer.ready
        self.ready = self._mark is None
        self._cancelled = False
        self._dropped = False
        self._error: BaseException | None = None
        self._by_path = Counter[str]()
        self.legs: list[Leg] = []
        self.flights: set[Flight] = set()

    def arrange(self, block_bytes: int) -> None:
        """Make the legs."""
        table = self.batch.table
        for write in (True, False):
            rows = table[(table["write"] != 0) == write]
            rows = rows[rows["nbytes"] > 0]
            if len(rows):
                self.legs.append(Leg(self, write, rows, block_bytes))

    def stop(self) -> None:
        """Drop the blocks that have not started; from any thread."""
        self._cancelled = True
        self._wake()

    @property
    def stopped(self) -> bool:
        """Whether nothing more is to be started."""
        return self._cancelled or self._error is not None

    def look(self) -> bool:
        """Find out whether the work is ready, and return it.

        Raises
        ------
        BrokenError
            The GPU failed.
        """
        if self._mark is not None and self._mark.query():
            self._mark, self.ready = None, True
        return self.ready

    def fail(self, error: BaseException) -> None:
        """Record the first error, and stop what is under way."""
        if self._error is None or isinstance(self._error, CancelledError):
            self._error = error
        self.cancel_flights()

    def cancel_flights(self) -> None:
        """Stop what the host path has not started yet."""
        for flight in list(self.flights):
            if flight.transfer is not None:
                flight.transfer.cancel()

    def drop(self) -> None:
        """Note that something will not be done."""
        self._dropped = True

    def count(self, record: TransferRecord) -> None:
        """Account what the host path moved."""
        self._by_path.update(record.by_path)

    @property
    def over(self) -> bool:
        """Whether nothing is left to start and nothing is under way."""
        return not self.flights and all(leg.over for leg in self.legs)

    def end(self) -> None:
        """End the transfer."""
        error = self._error
        if error is None and self._dropped:
            error = CancelledError("The transfer was cancelled")
        paths = {PREFIX + path: PathStatistics(n) for path, n in self._by_path.items()}
        # They refer to each other, and to the caller's memory.
        self.legs.clear()
        self._ledger.end(self.transfer, error, paths)


class Leg:
    """All reads, or all writes, of a transfer, cut into staging blocks.

    Attributes
    ----------
    work : Work
    write : bool
        From GPU memory to files.
    """

    def __init__(self, work: Work, write: bool, rows: Table, block_bytes: int) -> None:
        self.work = work
        self.write = write
        files = cast(Sequence[StagedFile], work.batch.files)
        self._files = [file.inner for file in files]
        granules = np.array([file.granule for file in files], "i8")
        room = bound(rows, block_bytes, int(granules.max()))
        pieces, runs = np.zeros(room, PIECE), np.zeros(room, RUN)
        n_pieces, n_runs = arrange(rows, granules, block_bytes, pieces, runs)
        self._pieces, self._runs = pieces[:n_pieces], runs[:n_runs]
        self._next, self._blocks = 0, int(pieces[n_pieces - 1]["block"]) + 1
        numbers = np.arange(self._blocks + 1)
        self._first_piece = np.searchsorted(self._pieces["block"], numbers)
        self._first_run = np.searchsorted(self._runs["block"], numbers)

    @property
    def over(self) -> bool:
        """Whether all blocks were started, or will never be."""
        return self._next >= self._blocks

    def drop(self) -> None:
        """Start no more blocks."""
        if not self.over:
            self._next = self._blocks
            self.work.drop()

    def start(self, block: int, address: int) -> Flight:
        """Return the flight of the next block of the leg, in a staging block."""
        number = self._next
        self._next += 1
        pieces = self._pieces[self._first_piece[number] : self._first_piece[number + 1]]
        runs = self._runs[self._first_run[number] : self._first_run[number + 1]]
        flight = Flight(self, block, address, pieces, self._batch(runs, address))
        self.work.flights.add(flight)
        return flight

    def _batch(self, runs: Table, address: int) -> Batch:
        """Return what the host path does of a block."""
        table = np.empty(len(runs), REQUEST)
        table["addr"] = runs["place"] + address
        table["offset"], table["nbytes"] = runs["offset"], runs["nbytes"]
        table["write"] = self.write
        numbers = runs["file"]
        if len(self._files) == 1:
            table["file"] = 0
            return Batch(table, tuple(self._files), ())
        used, table["file"] = np.unique(numbers, return_inverse=True)
        return Batch(table, tuple(self._files[number] for number in used), ())


class Flight:
    """One staging block on its way between GPU memory and files.

    Attributes
    ----------
    leg : Leg
    block : int
        Number of the staging block.
    batch : Batch
        Its ranges of files.
    nbytes : int
    transfer : Transfer or None
        That of the host path, once it was submitted.
    begun : float
        When the copy was put on the stream.
    """

    __slots__ = ("_address", "_pieces", "batch", "begun", "block", "leg", "transfer")

    def __init__(self, leg: Leg, block: int, address: int, pieces: Table, batch: Batch) -> None:
        self.leg = leg
        self.block = block
        self.batch = batch
        self._address = address
        self._pieces = pieces
        self.transfer: Transfer | None = None
        self.begun = 0.0

    @property
    def work(self) -> Work:
        """The transfer that it is a part of."""
        return self.leg.work

    @property
    def nbytes(self) -> int:
        """Bytes in the block."""
        return self.batch.nbytes

    def ranges(self) -> tuple[list[int], list[int], list[int]]:
        """Return destinations, sources and sizes of the copies."""
        pieces = self._pieces
        gpu, host = pieces["addr"].tolist(), (pieces["place"] + self._address).tolist()
        there, here = (host, gpu) if self.leg.write else (gpu, host)
        return there, here, pieces["nbytes"].tolist()
