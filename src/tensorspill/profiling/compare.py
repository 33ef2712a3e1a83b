"""Comparing two sets of results: what became slower or faster, and if that is more than chance.

Rates of a drive have long tails and no known distribution, so ranks are compared (Mann-Whitney,
exact, ties included). Rounds of one run have the drive's mood of that minute in common, which no
test can tell from a change; where both sides have several runs of a point, their medians are
compared in place of rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tensorspill.profiling.rows import Results, Row

__all__ = ["Change", "Compared", "compare", "rank_test"]

#: Columns by which a row of one file is the same point as a row of the other.
_KEY = (
    "engine", "direction", "gpu", "block_bytes", "depth", "threads", "total_bytes", "fsync", "numa",
)  # fmt: skip
#: Of these on both sides, runs are compared and not rounds: with fewer, nothing could be told.
_RUNS = 4
#: Beyond this many samples of both sides the exact distribution is replaced by the normal one.
_EXACT = 60


@dataclass(frozen=True, slots=True)
class Change:
    """One point in both.

    Attributes
    ----------
    label : str
    before, after : float
        Median GB/s.
    ratio : float
        After over before.
    p : float
        How likely chance alone makes a difference as large, two-sided.
    adjusted : float
        The same, given that so many points are looked at (Benjamini and Hochberg).
    samples : tuple of int
        How many there were before and after.
    basis : {"rounds", "runs"}
        What the samples are.
    verdict : {"faster", "slower", "same"}
    """

    label: str
    before: float
    after: float
    ratio: float
    p: float
    adjusted: float
    samples: tuple[int, int]
    basis: str
    verdict: str


@dataclass(frozen=True, slots=True)
class Compared:
    """Two sets of results.

    Attributes
    ----------
    changes : tuple of Change
        Points in both, the one that lost most first.
    only_before, only_after : tuple of str
        Points in one of them alone.
    notes : tuple of str
        What could not be read.
    """

    changes: tuple[Change, ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def slower(self) -> tuple[Change, ...]:
        """The points that became slower."""
        return tuple(change for change in self.changes if change.verdict == "slower")

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return asdict(self)


def compare(
    before: Results, after: Results, threshold: float = 0.05, alpha: float = 0.05
) -> Compared:
    """Compare two sets of results point by point.

    Parameters
    ----------
    before, after : Results
    threshold : float
        A change of the median by less than this share is no change.
    alpha : float
        Share of false alarms among all alarms that is put up with.
    """
    old, new = _samples(before), _samples(after)
    both = [key for key in old if key in new]
    pairs = {key: _paired(old[key], new[key]) for key in both}
    ps = {key: rank_test(first, second) for key, (first, second, _) in pairs.items()}
    adjusted = _adjusted(ps)
    changes = []
    for key, (first, second, basis) in pairs.items():
        start, end = statistics.median(first), statistics.median(second)
        ratio = end / start if start else math.inf
        verdict = "same"
        if adjusted[key] <= alpha and abs(ratio - 1) > threshold:
            verdict = "slower" if ratio < 1 else "faster"
        sizes = (len(first), len(second))
        changes.append(
            Change(key[0], start, end, ratio, ps[key], adjusted[key], sizes, basis, verdict)
        )
    return Compared(
        tuple(sorted(changes, key=lambda change: change.ratio)),
        tuple(key[0] for key in old if key not in new),
        tuple(key[0] for key in new if key not in old),
        before.notes + after.notes,
    )


Key = tuple[str, tuple[Any, ...]]
Runs = list[tuple[float, ...]]


def _samples(results: Results) -> dict[Key, Runs]:
    """Return each point's runs, each as its rounds; a row without rounds is a run of one."""
    found: dict[Key, Runs] = {}
    for row, rounds in zip(results.rows, results.rounds, strict=True):
        if row.gbps_last_done is not None:
            found.setdefault(_key(row), []).append(rounds or (row.gbps_last_done,))
    return found


def _key(row: Row) -> Key:
    values = tuple(getattr(row, name) for name in _KEY)
    words = row.argument("--memory"), row.argument("--tensor")
    return f"{row.engine} {row.direction} {row.label}", (*values, *words)


def _paired(first: Runs, second: Runs) -> tuple[list[float], list[float], str]:
    if len(first) >= _RUNS and len(second) >= _RUNS:
        medians = [[statistics.median(run) for run in runs] for runs in (first, second)]
        return medians[0], medians[1], "runs"
    return [g for run in first for g in run], [g for run in second for g in run], "rounds"


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the two-sided p of the Mann-Whitney test; 1.0 if one of them is empty.

    Exact for up to 60 samples in all, by counting the ways to draw the ranks; beyond, by the normal
    distribution with the usual corrections.
    """
    n, m = len(first), len(second)
    if not n or not m:
        return 1.0
    # Twice the rank is a whole number for ties as well.
    doubled = _doubled_ranks([*first, *second])
    observed = sum(doubled[:n])
    middle = n * (n + m + 1)
    if n + m <= _EXACT:
        return _exact(doubled, n, abs(observed - middle), middle)
    ties = sum(count**3 - count for count in _counts(doubled).values())
    total = n + m
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0:
        return 1.0
    z = max(0.0, abs(observed - middle) / 2 - 0.5) / math.sqrt(variance)
    return math.erfc(z / math.sqrt(2))


def _doubled_ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for index in order[begin:end]:
            ranks[index] = begin + end + 1
        begin = end
    return ranks


def _counts(ranks: Sequence[int]) -> Mapping[int, int]:
    found: dict[int, int] = {}
    for rank in ranks:
        found[rank] = found.get(rank, 0) + 1
    return found


def _exact(doubled: Sequence[int], n: int, away: int, middle: int) -> float:
    """Return the share of all draws of `n` ranks whose sum is at least as far from the middle."""
    ways: list[dict[int, int]] = [{0: 1}] + [{} for _ in range(n)]
    for rank in doubled:
        for taken in range(n, 0, -1):
            for total, count in ways[taken - 1].items():
                ways[taken][total + rank] = ways[taken].get(total + rank, 0) + count
    far = sum(count for total, count in ways[n].items() if abs(total - middle) >= away)
    return far / math.comb(len(doubled), n)


def _adjusted(ps: Mapping[Key, float]) -> dict[Key, float]:
    """Return p values adjusted for their number, by Benjamini and Hochberg."""
    ordered = sorted(ps.items(), key=lambda item: item[1], reverse=True)
    found: dict[Key, float] = {}
    least = 1.0
    for place, (key, p) in enumerate(ordered):
        least = min(least, p * len(ps) / (len(ps) - place))
        found[key] = least
    return found
