"""What simpler rules would take, to compare a plan with."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.writers.plan import longest
from tensorspill.topology.writers.selection import select_writers
from tensorspill.topology.writers.slices import Slices

__all__ = ["RULES", "Alternative", "alternatives"]

#: Name of each rule, the unit that it has one writer of, and what it does.
RULES = (
    ("first-replica", Unit.NONE, "the lowest rank that holds a slice writes all of it"),
    ("equal-split", Unit.REPLICA, "all replicas of a slice write equal parts"),
    ("one-per-machine", Unit.MACHINE, "one replica on each machine, in equal parts"),
)


@dataclass(frozen=True)
class Alternative:
    """What a rule would take: `makespan` in microseconds, and how many ranks would write.

    `why_not` says why the rule can't be followed; the makespan is None then.
    """

    rule: str
    meaning: str
    makespan: Fraction | None
    writers: int
    why_not: str = ""

    @property
    def makespan_s(self) -> float | None:
        """The makespan in seconds."""
        return None if self.makespan is None else float(self.makespan) / 1e6


def alternatives(slices: Slices, placement: Placement) -> tuple[Alternative, ...]:
    """Return what each of `RULES` would take, among replicas that can write."""
    slices = _live(slices, placement)
    total = np.zeros(len(slices.sets), np.int64)
    np.add.at(total, slices.set_of, slices.nbytes)
    found = []
    for rule, unit, meaning in RULES:
        try:
            writers = select_writers(slices, placement, unit).writers
        except UnsupportedError as error:
            found.append(Alternative(rule, meaning, None, 0, str(error)))
            continue
        written = _equal(total, writers, placement.ranks)
        load = placement.forest.rank_load(written)
        count = int(np.count_nonzero(written))
        found.append(Alternative(rule, meaning, longest(placement.forest, load), count))
    return tuple(found)


def _live(slices: Slices, placement: Placement) -> Slices:
    """Return the slices with only those replicas that can write, where there are any."""
    sets, forest = slices.sets, placement.forest
    alive = forest.alive[forest.leaf[sets.ranks]]
    if alive.all():
        return slices
    owner = np.repeat(np.arange(len(sets)), sets.sizes)
    some = np.zeros(len(sets), np.bool_)
    some[owner[alive]] = True
    kept = alive | ~some[owner]
    begin = np.searchsorted(owner[kept], np.arange(len(sets) + 1))
    return slices.on(ReplicaSets(begin, sets.ranks[kept]))


def _equal(nbytes: Integers, writers: ReplicaSets, ranks: int) -> Integers:
    """Return the bytes of each rank if each set's bytes are split evenly among its writers."""
    part, rest = np.divmod(nbytes, writers.sizes)
    owner = np.repeat(np.arange(len(writers)), writers.sizes)
    index = np.arange(len(writers.ranks)) - writers.begin[owner]
    written = np.zeros(ranks, np.int64)
    np.add.at(written, writers.ranks, part[owner] + (index < rest[owner]))
    return written
