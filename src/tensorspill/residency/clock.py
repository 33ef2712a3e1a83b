"""How much of the time that transfers take passes behind compute."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorspill import timeline
from tensorspill.engine.transfer import Transfer

__all__ = ["TransferClock"]


class TransferClock:
    """Measures two spans: transfers under way, and the caller waiting for one.

    Transfers that overlap one another count once, and so do waits inside of waits.

    Parameters
    ----------
    what : str
        Is moved; what timelines call it.

    Attributes
    ----------
    stalled : float
        Seconds in which the caller waited for a transfer.
    """

    def __init__(self, what: str = "parameters") -> None:
        self._what = what
        self._lock = threading.Lock()
        self._live = 0
        self._since = 0.0
        self._busy = 0.0
        self._waiting = False
        self.stalled = 0.0

    @property
    def busy(self) -> float:
        """Seconds in which at least one transfer was under way."""
        with self._lock:
            return self._busy + (time.perf_counter() - self._since if self._live else 0.0)

    def watch(self, transfer: Transfer, begun: float | None = None) -> None:
        """Count a transfer as under way from `begun` (`time.perf_counter`), or now, to its end."""
        begun = time.perf_counter() if begun is None else begun
        with self._lock:
            if not self._live:
                self._since = max(begun, self._since)
            self._live += 1
        transfer.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        with self._lock:
            self._live -= 1
            if not self._live:
                now = time.perf_counter()
                self._busy += now - self._since
                self._since = now

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count what the caller does inside of this as stalled."""
        if self._waiting:
            yield
            return
        self._waiting = True
        begun = time.perf_counter()
        try:
            with timeline.span("stall", self._what):
                yield
        finally:
            self.stalled += time.perf_counter() - begun
            self._waiting = False
