"""Joining the parts of a transfer: it ends when the last part has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError

from tensorspill.engine.ledger import Ledger
from tensorspill.engine.statistics import PathStatistics
from tensorspill.engine.transfer import Transfer

__all__ = ["Progress"]


class Progress:
    """What the parts of one transfer share.

    Attributes
    ----------
    stopped : bool
        Whether what has not started is to be dropped; read between operations.
    """

    def __init__(self, ledger: Ledger, transfer: Transfer) -> None:
        self._ledger = ledger
        self._transfer = transfer
        self._lock = threading.Lock()
        self._left = 1
        self._error: BaseException | None = None
        self._paths: dict[str, PathStatistics] = {}
        self._stops: list[Callable[[], object]] = []
        self._ends: list[Callable[[], object]] = []
        self.stopped = False
        transfer.on_cancel(self.stop)

    def stop(self) -> None:
        """Drop what has not started."""
        with self._lock:
            self.stopped = True
            stops = list(self._stops)
        for stop in stops:
            stop()

    def on_stop(self, stop: Callable[[], object]) -> None:
        """Have something else stopped as well, at once if it is too late."""
        with self._lock:
            self._stops.append(stop)
            stopped = self.stopped
        if stopped:
            stop()

    def at_end(self, end: Callable[[], object]) -> None:
        """Have something done when all parts have ended, before the transfer does."""
        self._ends.append(end)

    def expect(self, parts: int) -> None:
        """Say how many parts there are, before the first begins."""
        self._left = parts

    def part_ended(
        self, error: BaseException | None, paths: Mapping[str, PathStatistics] | None = None
    ) -> None:
        """Account one part; an error stops the others."""
        if error is not None:
            self.stop()
        with self._lock:
            self._left -= 1
            if error is not None and (
                self._error is None or isinstance(self._error, CancelledError)
            ):
                self._error = error
            for path, moved in (paths or {}).items():
                self._paths[path] = self._paths.get(path, PathStatistics()) + moved
            if self._left:
                return
        self._stops.clear()
        while self._ends:
            self._ends.pop()()
        self._ledger.end(self._transfer, self._error, self._paths)
