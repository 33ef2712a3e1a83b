"""How long operations took: a histogram in steps of an eighth of a power of two."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

__all__ = ["BUCKETS", "FIRST_BITS", "STEP_BITS", "Latencies"]

#: The first bucket takes all below ``2**FIRST_BITS`` nanoseconds, about a microsecond.
FIRST_BITS = 10
#: Each power of two is divided into ``2**STEP_BITS`` buckets: 9 % is the most they are wide.
STEP_BITS = 3
_OCTAVES = 27
#: The last bucket takes all from about two minutes on.
BUCKETS = 1 + (_OCTAVES << STEP_BITS)

Counts = NDArray[np.int64]


class Latencies:
    """Counts of operations by the time that each took.

    Immutable. Sums of the histograms of parts are the histogram of the whole, which percentiles are
    not.

    Parameters
    ----------
    counts : ndarray of int64, shape (BUCKETS,), optional
        Operations in each bucket; taken over, and made read-only. None at all if not given.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: Counts | None = None) -> None:
        self._counts = np.zeros(BUCKETS, np.int64) if counts is None else counts
        self._counts.flags.writeable = False

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latencies:
        """Return the histogram of these times."""
        nanoseconds = (np.fromiter(seconds, np.float64) * 1e9).astype(np.int64)
        # The exponent of a float is what the kernels count shifts for.
        octave = np.maximum(np.frexp(nanoseconds.astype(np.float64))[1] - 1 - FIRST_BITS, -1)
        step = (nanoseconds >> np.maximum(octave + FIRST_BITS - STEP_BITS, 0)) & (
            (1 << STEP_BITS) - 1
        )
        bucket = np.where(octave < 0, 0, 1 + (octave << STEP_BITS) + step)
        return cls(np.bincount(np.minimum(bucket, BUCKETS - 1), minlength=BUCKETS))

    @property
    def count(self) -> int:
        """Number of operations."""
        return int(self._counts.sum())

    def percentile(self, share: float) -> float:
        """Return the seconds that this share (0 to 100) of the operations did not exceed.

        It is the upper end of a bucket, so at most an eighth too large; 0.0 without operations.
        """
        total = self.count
        if total == 0:
            return 0.0
        rank = max(1, int(np.ceil(total * min(max(share, 0.0), 100.0) / 100)))
        return _upper_end(int(np.searchsorted(np.cumsum(self._counts), rank))) / 1e9

    def __add__(self, other: Latencies) -> Latencies:
        return Latencies(self._counts + other._counts)

    def __sub__(self, other: Latencies) -> Latencies:
        """Return what came since `other`, an earlier state of the same histogram."""
        return Latencies(self._counts - other._counts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Latencies) and np.array_equal(self._counts, other._counts)

    def __hash__(self) -> int:
        return hash(self._counts.tobytes())

    def __reduce__(self) -> tuple[type[Latencies], tuple[Counts]]:
        return Latencies, (self._counts.copy(),)

    def __repr__(self) -> str:
        parts = ", ".join(f"p{p} {1e6 * self.percentile(p):.0f} µs" for p in (50, 99))
        return f"<Latencies of {self.count} operations, {parts}>"


def _upper_end(bucket: int) -> int:
    """Return the nanoseconds at which a bucket ends."""
    if bucket == 0:
        return 1 << FIRST_BITS
    octave, step = divmod(bucket - 1, 1 << STEP_BITS)
    return ((1 << STEP_BITS) + step + 1) << (octave + FIRST_BITS - STEP_BITS)
