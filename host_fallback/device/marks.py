"""Transfers whose caller's stream has not come to where the memory may be touched."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tensorspill.errors import SpillError

if TYPE_CHECKING:
    from tensorspill.host_fallback.device.work import Work

__all__ = ["Marks"]

#: Seconds between two looks: at first, and at most.
_SOON, _LATER = 50e-6, 2e-3


class Marks:
    """Looks at callers' streams, soon at first, then ever less often; used by one thread.

    Looking and not letting a stream wait: copies that wait on a stream would hold up those behind.
    """

    def __init__(self) -> None:
        self._waiting: dict[Work, None] = {}
        self._next, self._pause = 0.0, _SOON

    @property
    def flights(self) -> int:
        """How many staging blocks wait."""
        return sum(len(work.flights) for work in self._waiting)

    @property
    def timeout(self) -> float | None:
        """Seconds until `look` is due, or None if there is nothing to look at."""
        return max(self._next - time.perf_counter(), 0.0) if self._waiting else None

    def enter(self, work: Work) -> None:
        """Watch a work, unless it is ready."""
        if not self._see(work):
            self._waiting[work] = None
            self._next, self._pause = 0.0, _SOON

    def leave(self, work: Work) -> None:
        """Watch a work no more."""
        self._waiting.pop(work, None)

    def look(self) -> bool:
        """Look, if that is due; whether any work is ready now, or failed."""
        begun = time.perf_counter()
        if not self._waiting or begun < self._next:
            return False
        came = [work for work in self._waiting if self._see(work)]
        for work in came:
            del self._waiting[work]
        now = time.perf_counter()
        # Where thousands wait, looking must not be all that the thread does.
        self._pause = _SOON if came else min(2 * self._pause, _LATER)
        self._next = now + max(self._pause, 2 * (now - begun))
        return bool(came)

    def _see(self, work: Work) -> bool:
        try:
            return work.look()
        except SpillError as error:
            work.fail(error)
            return True
