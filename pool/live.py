"""Memory ranges that live transfers read or write, so that nobody frees them meanwhile."""

from __future__ import annotations

import itertools
import threading

import numpy as np
from numpy.typing import NDArray

__all__ = ["LiveRanges", "live_ranges"]

Int64s = NDArray[np.int64]


class LiveRanges:
    """Address ranges in use, one entry for each batch of requests.

    Adding and removing cost the same for one range as for a thousand; the search is done by whoever
    wants to free memory, over the few batches that are under way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tokens = itertools.count()
        self._ranges: dict[int, tuple[Int64s, Int64s]] = {}

    def add(self, starts: Int64s, sizes: Int64s) -> int:
        """Mark ``[starts[i], starts[i] + sizes[i])`` as in use; return the token for `remove`."""
        with self._lock:
            token = next(self._tokens)
            self._ranges[token] = (starts, sizes)
        return token

    def remove(self, token: int) -> None:
        """End the use that `add` began; an unknown token does no harm."""
        with self._lock:
            self._ranges.pop(token, None)

    def overlap(self, start: int, nbytes: int) -> bool:
        """Whether any live range shares a byte with ``[start, start + nbytes)``."""
        if nbytes <= 0:
            return False
        with self._lock:
            ranges = list(self._ranges.values())
        return any(
            bool(np.any((starts < start + nbytes) & (starts + sizes > start) & (sizes > 0)))
            for starts, sizes in ranges
        )


#: The table of this process: device and host addresses share one address space (CUDA's UVA).
live_ranges = LiveRanges()
