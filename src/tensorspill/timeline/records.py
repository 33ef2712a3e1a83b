"""Frozen records of what steps were made of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from tensorspill.timeline.spans import Span

__all__ = ["StepRecord", "Timeline", "record_step"]

Times = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step was made of.

    Attributes
    ----------
    number : int
        From 1.
    begin : float
        Seconds, of `time.perf_counter`.
    seconds : float
        The step took.
    compute : float
        Seconds in which something was computed and didn't wait.
    stall : float
        Seconds in which compute waited for a transfer.
    transfer : float
        Seconds in which at least one transfer was under way.
    hidden : float
        Of `transfer`, seconds in which nothing waited for it.
    bytes_read, bytes_written : int
        By transfers that ended in this step.
    by_path : mapping of str to int
        These bytes divided among the paths taken.
    """

    number: int
    begin: float
    seconds: float
    compute: float
    stall: float
    transfer: float
    hidden: float
    bytes_read: int
    bytes_written: int
    by_path: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes moved, both ways together."""
        return self.bytes_read + self.bytes_written

    @property
    def hidden_pct(self) -> float:
        """Per cent of the transfers' time that passed while nothing waited for it."""
        return 100 * self.hidden / self.transfer if self.transfer > 0 else 100.0

    @property
    def stall_pct(self) -> float:
        """Per cent of the step in which compute waited."""
        return 100 * self.stall / self.seconds if self.seconds > 0 else 0.0

    @property
    def gbps(self) -> float:
        """GB/s (decimal) while transfers were under way."""
        return self.nbytes / self.transfer / 1e9 if self.transfer > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Timeline:
    """What was recorded.

    Attributes
    ----------
    steps : tuple of StepRecord
    spans : tuple of Span
        In the order of their ends; the oldest are left out if there are too many.
    left_out : int
        How many.
    bytes_read, bytes_written : int
        In all, also outside of steps.
    """

    steps: tuple[StepRecord, ...]
    spans: tuple[Span, ...]
    left_out: int
    bytes_read: int
    bytes_written: int

    def total(self, skip: int = 0) -> StepRecord:
        """Return all steps after the first `skip` as if they were one, with number 0."""
        steps = self.steps[skip:]
        by_path: Counter[str] = Counter()
        for step in steps:
            by_path.update(step.by_path)
        return StepRecord(
            0,
            steps[0].begin if steps else 0.0,
            sum(step.seconds for step in steps),
            sum(step.compute for step in steps),
            sum(step.stall for step in steps),
            sum(step.transfer for step in steps),
            sum(step.hidden for step in steps),
            sum(step.bytes_read for step in steps),
            sum(step.bytes_written for step in steps),
            MappingProxyType(dict(by_path)),
        )


def record_step(number: int, begin: float, end: float, spans: Iterable[Span]) -> StepRecord:
    """Return the record of a step; `spans` may reach beyond it, and overlap."""
    spans = list(spans)
    computed, moved, waited = (
        _union((max(s.begin, begin), min(s.end, end)) for s in spans if s.kind == kind)
        for kind in ("compute", "transfer", "stall")
    )
    ended = [s for s in spans if s.kind == "transfer" and begin <= s.end <= end]
    by_path: Counter[str] = Counter()
    for span in ended:
        by_path.update(span.by_path)
    return StepRecord(
        number,
        begin,
        end - begin,
        _length(computed) - _common(computed, waited),
        _length(waited),
        _length(moved),
        _length(moved) - _common(moved, waited),
        sum(s.nbytes for s in ended if not s.written),
        sum(s.nbytes for s in ended if s.written),
        MappingProxyType(dict(by_path)),
    )


def _union(times: Iterable[tuple[float, float]]) -> Times:
    """Return disjoint times in order."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(t for t in times if t[0] < t[1]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length(times: Times) -> float:
    return sum(end - begin for begin, end in times)


def _common(left: Times, right: Times) -> float:
    """Return how long both of two sequences of disjoint times last."""
    total, i, j = 0.0, 0, 0
    while i < len(left) and j < len(right):
        begin, end = max(left[i][0], right[j][0]), min(left[i][1], right[j][1])
        total += max(0.0, end - begin)
        if left[i][1] < right[j][1]:
            i += 1
        else:
            j += 1
    return total
