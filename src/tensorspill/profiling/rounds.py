"""Rounds: named cases run in turn and in random order, compared in pairs of the same round.

A shared or virtual drive changes its rate from minute to minute by more than what is to be
measured. Two cases of one round met the same conditions, so it is the ratios of such pairs that
count, and what two runs of one case differ by tells how much of a difference is noise.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tensorspill.profiling.clock import Sample

__all__ = [
    "Case",
    "Quantity",
    "Results",
    "Spread",
    "cpu_seconds",
    "gbps",
    "noise_floor",
    "run_rounds",
    "spread",
]

#: Prepares, runs and checks; times only the running. None if it can't be measured here.
Case = Callable[[], Sample | None]

Quantity = Callable[[Sample], float | None]


def gbps(sample: Sample) -> float | None:
    """Return the rate in GB/s."""
    return sample.gbps


def cpu_seconds(sample: Sample) -> float | None:
    """Return the CPU seconds."""
    return sample.cpu


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of some values."""

    median: float
    q1: float
    q3: float
    count: int

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.q1:.2f}, {self.q3:.2f}]"


def spread(values: Sequence[float]) -> Spread | None:
    """Return median and quartiles, or None of no values."""
    if not values:
        return None
    if len(values) == 1:
        return Spread(values[0], values[0], values[0], 1)
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3, len(values))


def noise_floor(ratios: Sequence[float]) -> float | None:
    """Return how far apart two runs of the same case are: half of the pairs differ by less.

    Parameters
    ----------
    ratios : sequence of float
        Of identical cases, in pairs of the same round.
    """
    return statistics.median(abs(ratio - 1) for ratio in ratios) if ratios else None


class Results:
    """Samples by case and round.

    Attributes
    ----------
    samples : dict of str to list of (Sample or None)
        One for each round.
    """

    def __init__(self, samples: Mapping[str, list[Sample | None]]) -> None:
        self.samples = dict(samples)

    def values(self, case: str, quantity: Quantity = gbps) -> list[float | None]:
        """Return a quantity, the rate if none is given, of each round."""
        return [None if s is None else quantity(s) for s in self.samples.get(case, [])]

    def spread(self, case: str, quantity: Quantity = gbps) -> Spread | None:
        """Return median and quartiles of a case."""
        return spread([v for v in self.values(case, quantity) if v is not None])

    def ratios(self, case: str, reference: str, quantity: Quantity = gbps) -> list[float]:
        """Return case over reference for each round that has both."""
        pairs = zip(self.values(case, quantity), self.values(reference, quantity), strict=True)
        return [ours / theirs for ours, theirs in pairs if ours is not None and theirs]

    def spread_of_ratios(
        self, case: str, reference: str, quantity: Quantity = gbps
    ) -> Spread | None:
        """Return median and quartiles of case over reference, in pairs of the same round."""
        return spread(self.ratios(case, reference, quantity))

    def median(self, case: str, quantity: Quantity = gbps) -> float | None:
        """Return the median of a case, or None if it was not measured."""
        found = self.spread(case, quantity)
        return None if found is None else found.median

    def fastest(self, cases: Sequence[str]) -> str:
        """Return the case with the highest median rate; the first if none was measured."""
        return max(cases, key=lambda case: self.median(case) or 0.0)

    def cheapest(self, cases: Sequence[str]) -> str:
        """Return the case with the lowest median of CPU seconds, if any was measured."""
        return min(cases, key=lambda case: self.median(case, cpu_seconds) or float("inf"))

    def derive(self, case: str, make: Callable[..., Sample], *sources: str) -> None:
        """Add a case that is computed from others, round by round."""
        columns = [self.samples[source] for source in sources]
        self.samples[case] = [
            None if None in samples else make(*samples) for samples in zip(*columns, strict=True)
        ]


def run_rounds(
    cases: Mapping[str, Case],
    rounds: int,
    chance: random.Random,
    tick: Callable[[str], None] = lambda _: None,
) -> Results:
    """Run every case once a round, each round in another order.

    Parameters
    ----------
    cases : mapping of str to Case
    rounds : int
    chance : random.Random
        Decides about the order.
    tick : callable
        Told what is run next.
    """
    samples: dict[str, list[Sample | None]] = {name: [] for name in cases}
    for number in range(rounds):
        order = list(cases)
        chance.shuffle(order)
        for name in order:
            tick(f"round {number + 1} of {rounds}: {name}")
            samples[name].append(cases[name]())
    return Results(samples)
