"""The best time, and then a fair share of what is left: slack resources carry their part as well.

Any preflow that takes T* would do for the makespan, but may leave most writers idle. So bytes are
spread by capacity first, evened out for a few sweeps, and only then moved as far as T* demands.
After that the resources of the cut are held at what T* lets them carry, the least time of all
others is sought, and so on: in the end the loads are the lexicographically smallest and so the same
whatever ranks and machines are called. That is done for as many levels as a fixed amount of work
allows, and followed by a last few sweeps.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.demand import Demand, first_guess
from tensorspill.topology.solver.forest import Forest
from tensorspill.topology.solver.newton import Solution, Solver

__all__ = ["solve"]

_FIRST_SWEEPS, _LAST_SWEEPS = 2, 4
#: Levels times members that are worth their time.
_LEVELS = 1024
#: A sweep that moves less than this many bytes at a time is the last.
_GRAIN = 1 << 16
_NO_LIMIT = 1 << 61
#: Bits of ticks in a time, if sizes times ticks fit into 60 bits. A plan can be a tick late.
_TICKS, _ROOM = 24, 60


def solve(demand: Demand, forest: Forest) -> Solution:
    """Return the least time, with bytes for each member shared out fairly.

    Raises
    ------
    Stuck
        If some groups can't be written at all.
    """
    slope = np.where(forest.alive, forest.capacity, 0)
    fixed = np.zeros_like(slope)
    shift = _shift(demand, slope)
    demand = replace(demand, nbytes=demand.nbytes << shift)
    solver = Solver(demand, forest)
    given = first_guess(demand, forest)
    _share(demand, forest, given, np.full_like(slope, _NO_LIMIT), _FIRST_SWEEPS)
    best = level = solver.solve(given, slope, fixed)
    limit = solver.capacity(level.time, slope, fixed)
    for _ in range(_LEVELS // max(len(demand.leaf), 1)):
        held = level.tight & (slope > 0)
        if not held.any():
            break
        fixed = np.where(held, solver.capacity(level.time, slope, fixed), fixed)
        slope = np.where(held, 0, slope)
        if not slope.any():
            break
        level = solver.solve(level.given, slope, fixed)
        limit = solver.capacity(level.time, slope, fixed)
    given = level.given
    _share(demand, forest, given, limit, _LAST_SWEEPS)
    bound = best.bound / (1 << shift)
    return replace(best, given=_whole(given, demand.begin, shift), bound=bound)


def _shift(demand: Demand, slope: Integers) -> int:
    """Return by how many bits to scale sizes, so that a microsecond has that many bits of ticks."""
    total = demand.copies * int(demand.nbytes.sum())
    shortest = total // max(int(slope.sum()), 1)
    return max(0, min(_ROOM - total.bit_length(), _TICKS - shortest.bit_length()))


def _whole(given: Integers, begin: Integers, shift: int) -> Integers:
    """Return scaled bytes as whole ones, with the same sum for each group."""
    until = np.cumsum(given)
    until -= np.repeat((until - given)[begin[:-1]], np.diff(begin))
    until >>= shift
    whole = np.diff(until, prepend=0)
    whole[begin[:-1]] = until[begin[:-1]]
    return whole


def _share(demand: Demand, forest: Forest, given: Integers, limit: Integers, sweeps: int) -> None:
    """Even out `given` in place, within the limits."""
    from tensorspill.topology.solver.share_kernels import share

    at_leaf = np.zeros(len(forest.capacity), np.int64)
    np.add.at(at_leaf, demand.leaf, given)
    load = forest.load(at_leaf)
    begin = demand.domain_begin if demand.copies > 1 else demand.begin
    share(begin, demand.leaf, given, forest.paths, load, forest.capacity, limit, sweeps, _GRAIN)
