"""The least time T* in which all bytes can be written, by minimum cuts and Newton's method.

In t microseconds a resource carries at most ``slope * t + fixed`` bytes. Of any set of groups whose
bytes must cross some cut, at least ``(bytes - fixed(cut)) / slope(cut)`` microseconds are needed.
From such a bound as t, the maximum preflow either carries everything, and the bound was T* itself,
or leaves excess and with it a minimum cut, whose bound is larger. Since capacities only grow from
step to step, each step goes on from the preflow of the last.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tensorspill.topology.solver.arrays import Flags, Integers
from tensorspill.topology.solver.demand import Demand
from tensorspill.topology.solver.forest import Forest

__all__ = ["Solution", "Solver", "Stuck"]

_ENDLESS = 1 << 61
#: Rounds of a preflow that does not end sooner, before a bound is taken from it as it is.
_FIRST_ROUNDS = 3


@dataclass(frozen=True, eq=False)
class Solution:
    """What `Solver.solve` found.

    Parameters
    ----------
    time : int
        The first whole tick at or after T*. A tick is a microsecond, or less if sizes are scaled.
    bound : Fraction
        T* in ticks, as the bound of a cut; T* is at most `time`.
    given : array of int64
        Bytes for each member, for which no resource needs more than `time`.
    tight : array of bool
        The resources of the cut whose capacity grows: busy for the whole of T* in every best plan.
    bound_groups : array of bool
        The groups that must cross the cut.
    """

    time: int
    bound: Fraction
    given: Integers
    tight: Flags
    bound_groups: Flags


class Stuck(Exception):  # noqa: N818 - it never leaves this package
    """No time is enough for these groups; `groups` are their numbers."""

    def __init__(self, groups: Integers) -> None:
        super().__init__(groups)
        self.groups = groups


class Solver:
    """One demand on one forest: the network, and the preflow that is carried from step to step."""

    def __init__(self, demand: Demand, forest: Forest) -> None:
        self.demand, self.forest = demand, forest
        self.groups, self.kinds = len(demand.nbytes), len(forest.capacity)
        self.members = len(demand.leaf)
        self.wanted = demand.nbytes * demand.copies
        self.owner = demand.domain_owner if demand.copies > 1 else np.zeros(0, np.int64)
        self.domains = len(self.owner)
        self.first_resource = self.groups + self.domains
        self.nodes = self.first_resource + self.kinds + 1
        self.total = int(self.wanted.sum())
        self._connect()

    def _connect(self) -> None:
        from tensorspill.topology.solver.flow_kernels import adjacency

        demand, forest, first = self.demand, self.forest, self.first_resource
        groups = np.repeat(np.arange(self.groups), np.diff(demand.begin))
        entry = first + demand.leaf
        above = np.where(forest.parent >= 0, first + forest.parent, self.nodes - 1)
        tails, heads = [groups, np.arange(first, first + self.kinds)], [entry, above]
        if self.domains:
            tails[0] = self.groups + demand.domain
            tails.append(self.owner)
            heads.append(self.groups + np.arange(self.domains))
        self.start, self.edges, self.to = adjacency(
            np.concatenate(tails).astype(np.int32),
            np.concatenate(heads).astype(np.int32),
            self.nodes,
        )
        self.residual = np.zeros(len(self.edges), np.int64)
        self.excess = np.zeros(self.nodes, np.int64)
        self.label = np.empty(self.nodes, np.int32)
        split = 2 * self.members, 2 * (self.members + self.kinds)
        self._member, self._resource = slice(0, split[0], 2), slice(split[0], split[1], 2)
        self._domain = slice(split[1], len(self.edges), 2)

    def capacity(self, time: int, slope: Integers, fixed: Integers) -> Integers:
        """Return what each resource carries in `time`, but no more than there is in all."""
        enough = slope > self.total // time
        carried = np.where(enough, self.total, slope * np.where(enough, 0, time))
        return np.minimum(carried + fixed, self.total)

    def solve(self, given: Integers, slope: Integers, fixed: Integers) -> Solution:
        """Find the least time for resources that carry ``slope * t + fixed``.

        Parameters
        ----------
        given : array of int64
            A first guess of the bytes of each member: no group's sum, and no domain's, too large.
        slope, fixed : array of int64
            Capacity of each resource in bytes a microsecond, and in bytes.

        Raises
        ------
        Stuck
            If no time is enough for some groups.
        """
        bound, tight = self._forest_bound(slope, fixed)
        time, bound_groups = max(1, math.ceil(bound)), np.ones(self.groups, np.bool_)
        limit = self.capacity(time, slope, fixed)
        self._begin(given, limit)
        rounds = _FIRST_ROUNDS
        while (step := self._step(rounds, slope, fixed)) is not None:
            if step[0] <= bound:
                rounds *= 2
                continue
            bound, tight, bound_groups = step
            rounds = _FIRST_ROUNDS
            time = max(time, math.ceil(bound))
            grown = self.capacity(time, slope, fixed)
            self.residual[self._resource] += grown - limit
            limit = grown
        given = self._carried(self._member)
        return Solution(time, bound, given, tight & (slope > 0), bound_groups)

    def _step(
        self, rounds: int, slope: Integers, fixed: Integers
    ) -> tuple[Fraction, Flags, Flags] | None:
        """Push excess on; return None if none is left, else a bound with its cut and its groups."""
        from tensorspill.topology.solver.flow_kernels import best_level, maximise

        if self.domains:  # levels are made for networks without domains only
            rounds = _ENDLESS
        left, done = maximise(
            self.start, self.edges, self.to, self.residual, self.excess, self.label, rounds
        )
        if not left:
            return None
        if done:
            return self._cut(slope, fixed)
        open_ = self.residual[self._resource]
        demand = self.demand
        label = best_level(
            demand.nbytes,
            demand.begin,
            demand.leaf,
            self.forest.paths,
            np.argsort(-self.label[: self.groups], kind="stable"),
            self.label,
            open_,
            slope,
            fixed,
        )
        return self._level_cut(label, open_, slope, fixed)

    def _begin(self, given: Integers, limit: Integers) -> None:
        """Start from these bytes for each member; what a resource can't pass on stays there."""
        demand, forest, first = self.demand, self.forest, self.first_resource
        inflow = np.zeros(self.kinds, np.int64)
        np.add.at(inflow, demand.leaf, given)
        passed = np.zeros(self.kinds, np.int64)
        for level in forest.levels[::-1]:
            passed[level] = np.minimum(inflow[level], limit[level])
            inner = level[forest.parent[level] >= 0]
            np.add.at(inflow, forest.parent[inner], passed[inner])
        self._set(self._member, given, np.full(self.members, _ENDLESS))
        self._set(self._resource, passed, limit)
        self.excess[: self.groups] = self.wanted - np.add.reduceat(given, demand.begin[:-1])
        self.excess[first:-1] = inflow - passed
        self.excess[-1] = 0
        if self.domains:
            through = np.add.reduceat(given, demand.domain_begin[:-1])
            self._set(self._domain, through, demand.nbytes[self.owner])
            self.excess[self.groups : first] = 0

    def _set(self, arcs: slice, carried: Integers, limit: Integers) -> None:
        self.residual[arcs] = limit - carried
        self.residual[arcs.start + 1 : arcs.stop : 2] = carried

    def _carried(self, arcs: slice) -> Integers:
        return self.residual[arcs.start + 1 : arcs.stop : 2].copy()

    def _cut(self, slope: Integers, fixed: Integers) -> tuple[Fraction, Flags, Flags]:
        """Return the bound of the cut behind which excess is left, its resources and its groups."""
        behind = self.label == self.nodes
        groups = behind[: self.groups]
        inside = behind[self.first_resource :]
        parent = np.where(self.forest.parent >= 0, self.forest.parent, self.kinds)
        cut = inside[:-1] & ~inside[parent]
        ends = behind[self.groups : self.first_resource]
        held = int(self.demand.nbytes[self.owner[groups[self.owner] & ~ends]].sum())
        return self._bound(groups, cut, slope, fixed, held), cut, groups

    def _level_cut(
        self, label: int, open_: Integers, slope: Integers, fixed: Integers
    ) -> tuple[Fraction, Flags, Flags]:
        """Return the bound of the groups of at least this label, with its resources and groups."""
        groups = self.label[: self.groups] >= label
        leaves = np.unique(self.demand.leaf[np.repeat(groups, np.diff(self.demand.begin))])
        paths = self.forest.paths[leaves]
        there = paths >= 0
        full = there & (open_[paths] == 0)
        levels = np.arange(paths.shape[1])
        last = np.where(
            full.any(1), np.where(full, levels, -1).max(1), np.where(there, levels, -1).max(1)
        )
        cut = np.zeros(self.kinds, np.bool_)
        cut[paths[np.arange(len(leaves)), last]] = True
        return self._bound(groups, cut, slope, fixed), cut, groups

    def _bound(
        self, groups: Flags, cut: Flags, slope: Integers, fixed: Integers, held: int = 0
    ) -> Fraction:
        """Return the time that these groups need to cross these resources, all but `held` bytes."""
        held = int(self.wanted[groups].sum()) - int(fixed[cut].sum()) - held
        if rate := int(slope[cut].sum()):
            return Fraction(held, rate)
        if held > 0:
            raise Stuck(np.flatnonzero(groups))
        return Fraction(0)

    def _forest_bound(self, slope: Integers, fixed: Integers) -> tuple[Fraction, Flags]:
        """Return a bound of T* that holds even if any member could write any byte, and its cut."""
        bound, best = Fraction(0), np.zeros(self.kinds, np.bool_)
        while True:
            cut = self._forest_cut(max(1, math.ceil(bound)), slope, fixed)
            if not (rate := int(slope[cut].sum())):
                return bound, best
            further = Fraction(self.total - int(fixed[cut].sum()), rate)
            if further <= bound:
                return bound, best
            bound, best = further, cut

    def _forest_cut(self, time: int, slope: Integers, fixed: Integers) -> Flags:
        """Return the resources that carry least of those that part all leaves from all roots."""
        forest = self.forest
        # Sums must not overflow; where this changes a comparison, what comes out is still a cut.
        own = np.minimum(self.capacity(time, slope, fixed), _ENDLESS // self.nodes)
        leaves = np.zeros(self.kinds, np.bool_)
        leaves[self.demand.leaf] = True
        below = np.where(leaves, _ENDLESS // self.nodes, 0)
        for level in forest.levels[:0:-1]:
            least = np.minimum(own[level], below[level])
            np.add.at(below, forest.parent[level], least)
        open_ = np.ones(self.kinds, np.bool_)
        cut = np.zeros(self.kinds, np.bool_)
        for level in forest.levels:
            parent = forest.parent[level]
            reached = np.where(parent >= 0, open_[np.maximum(parent, 0)], True)
            cut[level] = reached & (own[level] <= below[level]) & (below[level] > 0)
            open_[level] = reached & ~cut[level]
        return cut
