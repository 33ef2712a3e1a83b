"""Planning: from slices and a placement to a writer plan that is as fast as the hardware allows."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.solver import limits
from tensorspill.topology.solver.arrays import Flags, Integers
from tensorspill.topology.solver.demand import Demand
from tensorspill.topology.solver.forest import Forest
from tensorspill.topology.solver.newton import Solution, Stuck
from tensorspill.topology.writers.pieces import Lines, Pieces
from tensorspill.topology.writers.plan import WriterPlan
from tensorspill.topology.writers.selection import select_writers
from tensorspill.topology.writers.slices import MAX_BYTES, Slice, Slices

__all__ = ["BLOCK", "plan_writers"]

#: Bytes of slices without structure are cut at multiples of this.
BLOCK = 1 << 12


@dataclass(frozen=True)
class _Question:
    slices: Slices
    forest: Forest
    copies: int
    apart: Integers | None
    block: int
    min_chunk: int
    max_writers: int | None


def plan_writers(
    slices: Slices | Iterable[Slice],
    placement: Placement,
    *,
    unit: Unit | str = Unit.REPLICA,
    copies: int = 1,
    apart: Unit | str = Unit.MACHINE,
    exclude: Sequence[str] = (),
    min_chunk: int = 0,
    max_writers: int | None = None,
    block: int = BLOCK,
) -> WriterPlan:
    """Plan who writes which bytes, so that the last byte is written as early as possible.

    The plan follows from the arguments alone, in integers: ranks that were given the same make the
    same plan, without asking each other. The first plan of a process compiles kernels, or loads
    them from a cache.

    Parameters
    ----------
    slices : Slices or iterable of Slice
        What is to be written, and who holds it.
    placement : Placement
        Where ranks are, and what they share.
    unit : Unit or str
        Let only one replica of a slice write on each of these; see `select_writers`.
    copies : int
        How often each byte is to be written, each time in another failure domain.
    apart : Unit or str
        What a failure domain is.
    exclude : sequence of str
        Resources or machines, by name, through which nothing goes since they are dead or slow.
    min_chunk : int
        No writer gets less of a slice than so many bytes, unless it writes all of it; smaller atoms
        are not cut.
    max_writers : int, optional
        No slice gets more writers than this.
    block : int
        Where slices have no rows, they are cut at multiples of so many bytes.

    Raises
    ------
    UnsupportedError
        If a slice can't be written as asked; the message names slice and resource.
    """
    begun = time.perf_counter()
    if not isinstance(slices, Slices):
        slices = Slices.of(slices)
    unit, apart = Unit(unit), Unit(apart)
    _check(slices, copies, min_chunk, max_writers, block)
    where = placement.without(exclude) if exclude else placement
    writers = select_writers(slices, where, unit).writers
    domain = _domains(where, apart) if copies > 1 else None
    ask = _Question(slices, where.forest, copies, domain, block, min_chunk, max_writers)
    demand = _demand(ask, slices.sets, slices.set_of, len(slices.sets))
    best = _solve(ask, demand, slices.set_of)
    free = unit is Unit.REPLICA and not min_chunk and max_writers is None
    pieces = _cut(ask, demand, best.given, slices.set_of) if free else _limited(ask, writers)
    plan = WriterPlan(
        slices,
        where,
        pieces,
        best.bound,
        copies > 1 or not free,
        best.tight,
        (
            *(("unit", unit.value), ("copies", copies), ("apart", apart.value)),
            *(("exclude", tuple(sorted(exclude))), ("min_chunk", min_chunk)),
            *(("max_writers", max_writers), ("block", block)),
        ),
    )
    _ = plan.digest, plan.makespan
    object.__setattr__(plan, "planning_s", time.perf_counter() - begun)
    return plan


def _check(
    slices: Slices, copies: int, min_chunk: int, max_writers: int | None, block: int
) -> None:
    if copies < 1 or min_chunk < 0 or block < 1 or (max_writers is not None and max_writers < 1):
        raise UnsupportedError(
            f"copies={copies}, min_chunk={min_chunk}, max_writers={max_writers}, block={block}: "
            f"they start at 1, min_chunk at 0"
        )
    if copies * int(slices.nbytes.sum()) > MAX_BYTES:
        raise UnsupportedError(f"{copies} copies are more bytes than one plan can hold")


def _domains(placement: Placement, apart: Unit) -> Integers:
    if apart in (Unit.NONE, Unit.REPLICA):
        return np.arange(placement.ranks)
    domain = placement.where[apart]
    unknown = np.flatnonzero(domain < 0)
    if len(unknown):
        raise UnsupportedError(
            f"The {apart.value} of rank {unknown[0]} is unknown, so copies can't be kept apart"
        )
    return domain


def _demand(ask: _Question, sets: ReplicaSets, line_of: Integers, count: int) -> Demand:
    """Return the demand of so many lines of slices, with the live replicas of each."""
    nbytes = np.zeros(count, np.int64)
    np.add.at(nbytes, line_of, ask.slices.nbytes)
    leaf = ask.forest.leaf[sets.ranks]
    live = ask.forest.alive[leaf]
    owner = np.repeat(np.arange(count), sets.sizes)
    live |= (nbytes == 0)[owner]
    _enough(ask, sets, live, nbytes, line_of)
    ranks, leaf, owner = sets.ranks[live], leaf[live], owner[live]
    begin = np.searchsorted(owner, np.arange(count + 1))
    domain = None if ask.apart is None else ask.apart[ranks]
    return Demand.of(nbytes, begin, ranks, leaf, ask.copies, domain)


def _enough(
    ask: _Question, sets: ReplicaSets, live: Flags, nbytes: Integers, line_of: Integers
) -> None:
    """Raise if a slice has too few live replicas, or too few domains for its copies."""
    owner = np.repeat(np.arange(len(sets)), sets.sizes)
    if ask.apart is None:
        count = np.bincount(owner[live], minlength=len(sets))
    else:
        pairs = np.unique(np.stack([owner[live], ask.apart[sets.ranks[live]]]), axis=1)
        count = np.bincount(pairs[0], minlength=len(sets))
    short = np.flatnonzero((count < ask.copies) & (nbytes > 0))
    if not len(short):
        return
    line = int(short[0])
    name = _slice_in(ask, line_of, line)
    dead = [int(rank) for rank in sets[line][~live[sets.begin[line] : sets.begin[line + 1]]]]
    what = "no replica" if ask.copies == 1 else f"replicas in only {int(count[line])} domains"
    raise UnsupportedError(
        f"Slice {name} has {what} that can write{_why(ask.forest, dead)}",
        remedy="Exclude less, or hold the slice on more ranks",
    )


def _slice_in(ask: _Question, line_of: Integers, line: int) -> str:
    """Return the name of the first slice in a line that has bytes."""
    return ask.slices.names[int(np.flatnonzero((line_of == line) & (ask.slices.nbytes > 0))[0])]


def _why(forest: Forest, ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    path = forest.paths[forest.leaf[ranks[0]]]
    dead = [k for k in path.tolist() if k >= 0 and forest.capacity[k] == 0]
    return f": rank {ranks[0]} writes through {forest.names[dead[-1]]}, which is excluded"


def _solve(ask: _Question, demand: Demand, line_of: Integers) -> Solution:
    from tensorspill.topology.solver.balance import solve

    try:
        return solve(demand, ask.forest)
    except Stuck as stuck:
        line = int(stuck.groups[0])
        name = _slice_in(ask, line_of, line)
        raise UnsupportedError(
            f"Slice {name} can't be written {ask.copies} times: too little can pass through "
            f"{ask.forest.names[int(demand.leaf[demand.begin[line]])]} and its like"
        ) from None


def _cut(ask: _Question, demand: Demand, given: Integers, line_of: Integers) -> Pieces:
    lines = Lines(ask.slices, line_of, len(demand.nbytes), ask.block, ask.min_chunk)
    return lines.cut(demand, given)


def _limited(ask: _Question, writers: ReplicaSets) -> Pieces:
    """Return pieces that obey unit, minimum chunk and most writers; each slice for itself."""
    count = len(ask.slices)
    line_of = np.arange(count)
    lines = Lines(ask.slices, line_of, count, ask.block, ask.min_chunk)
    demand = _demand(ask, writers.take(ask.slices.set_of), line_of, count)
    most = limits.most_writers(
        demand.nbytes, lines.coarsest(), ask.copies, ask.min_chunk, ask.max_writers
    )
    demand = limits.restrict(demand, ask.forest, most)
    given = _solve(ask, demand, line_of).given
    if ask.min_chunk:
        given = limits.keep_chunks(demand, given, ask.min_chunk + lines.coarsest())
    return lines.cut(demand, given)
