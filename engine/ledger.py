"""The ledger of an engine: which transfers are under way, and the sums of what was done."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import CancelledError
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tensorspill.engine.batch import Batch
from tensorspill.engine.statistics import EngineStatistics, PathStatistics, TransferRecord
from tensorspill.engine.transfer import Transfer
from tensorspill.engine.watching import Ended, tell
from tensorspill.errors import ClosedError
from tensorspill.pool.live import live_ranges

if TYPE_CHECKING:
    from tensorspill.engine.file import File

__all__ = ["Ledger"]


class Ledger:
    """Counts transfers in and out; shared by an engine, its files and its threads.

    The engine's threads hold the ledger and not the engine, so that an engine nobody uses any more
    can be collected.

    Attributes
    ----------
    inner : bool
        Whether another engine counts the same bytes, so that nobody who watches is told of them.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.inner = False
        self.pid = os.getpid()
        # Entering a plain lock is one step for a signal handler, entering a Condition is not: an
        # exception from a handler, such as Ctrl-C's, would leave it locked for ever.
        self._mutex = threading.Lock()
        self._changed = threading.Condition(self._mutex)
        self._renewed = False
        self._closed = False
        self._live: dict[Transfer, tuple[Batch, int, float]] = {}
        self._counts = Counter[str]()
        self._paths: dict[str, PathStatistics] = {}
        self._notes: dict[str, None] = {}

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened the engine."""
        return os.getpid() != self.pid

    def check_open(self) -> None:
        """Raise `ClosedError` unless transfers may be submitted."""
        if self._closed:
            raise ClosedError("The engine is closed", path=self.path)
        if self.forked:
            raise ClosedError(
                "The engine belongs to the parent process",
                path=self.path,
                remedy="Open one in this process",
            )

    def _lock(self) -> threading.Lock:
        """Return the lock; in a forked child a new one, since nobody may ever let go of the old."""
        if self.forked and not self._renewed:
            self._mutex, self._renewed = threading.Lock(), True
            self._changed = threading.Condition(self._mutex)
        return self._mutex

    def begin(self, batch: Batch, transfer: Transfer) -> None:
        """Enter a transfer; its memory counts as in use until `end`."""
        with self._mutex:
            self.check_open()
            for file in batch.files:
                file.check_open()
            token = live_ranges.add(batch.table["addr"], batch.table["nbytes"])
            self._live[transfer] = (batch, token, time.perf_counter())
            self._counts["transfers"] += 1
            self._counts["requests"] += len(batch)

    def end(
        self,
        transfer: Transfer,
        error: BaseException | None,
        paths: Mapping[str, PathStatistics],
    ) -> None:
        """Leave a transfer, and end its future last, when everything else is in order."""
        with self._mutex:
            batch, token, begun = self._live.pop(transfer)
            live_ranges.remove(token)
            for path, moved in paths.items():
                known = self._paths.get(path)
                self._paths[path] = moved if known is None else known + moved
            if error is None:
                self._counts["bytes_written"] += batch.bytes_written
                self._counts["bytes_read"] += batch.nbytes - batch.bytes_written
            else:
                kind = "cancelled" if isinstance(error, CancelledError) else "failures"
                self._counts[kind] += 1
            self._changed.notify_all()
        by_path = {path: moved.nbytes for path, moved in paths.items() if moved.nbytes}
        ended = time.perf_counter()
        seconds = ended - begun
        if not self.inner:
            written = batch.bytes_written if error is None else 0
            read = batch.nbytes - batch.bytes_written if error is None else 0
            failed = error is not None
            tell(lambda: Ended(self.path, begun, ended, read, written, failed, dict(paths)))
        transfer.end(error or TransferRecord(batch.nbytes, seconds, MappingProxyType(by_path)))

    def note(self, text: str) -> None:
        """Record a limit that was met; the same text is kept once."""
        with self._lock():
            self._notes[text] = None

    def wait_idle(self, file: File | None = None) -> None:
        """Wait until no transfer, or none of `file`, is under way; at once in a forked child."""
        with self._lock():
            while not self.forked and any(
                file is None or file in batch.files for batch, _, _ in self._live.values()
            ):
                self._changed.wait()

    def close(self) -> None:
        """Refuse transfers from now on."""
        with self._lock():
            self._closed = True

    def statistics(self, **fields: Any) -> EngineStatistics:
        """Return the sums as a frozen record, completed by the engine's own `fields`."""
        with self._lock():
            counts = self._counts
            return EngineStatistics(
                folder=self.path,
                transfers=counts["transfers"],
                failures=counts["failures"],
                cancelled=counts["cancelled"],
                in_flight=len(self._live),
                requests=counts["requests"],
                bytes_read=counts["bytes_read"],
                bytes_written=counts["bytes_written"],
                by_path=MappingProxyType(dict(self._paths)),
                notes=tuple(self._notes),
                **fields,
            )
