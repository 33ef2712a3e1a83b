"""A Python thread that counts: what transfers leave of the interpreter to others."""

from __future__ import annotations

import bisect
import threading
import time
from types import TracebackType
from typing import Self

__all__ = ["CountingThread"]

#: Counts between two looks at the clock: a fraction of a millisecond.
_STEP = 5000


class CountingThread:
    """Counts in pure Python from entering to leaving its context.

    Times are those of `time.time`, to be comparable with those of files.
    """

    def __init__(self) -> None:
        self._times: list[float] = []
        self._stop = False
        self._thread = threading.Thread(target=self._count, name="counting", daemon=True)

    def _count(self) -> None:
        times, now = self._times, time.time
        while not self._stop:
            for _ in range(_STEP):
                pass
            times.append(now())

    def counted(self, begin: float, end: float) -> int:
        """Return how far it counted between two times."""
        inside = bisect.bisect(self._times, end) - bisect.bisect(self._times, begin)
        return inside * _STEP

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop = True
        self._thread.join()
