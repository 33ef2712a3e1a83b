"""Why a rank writes what it writes, in words."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensorspill.topology.writers.plan import WriterPlan

__all__ = ["Reason", "bottlenecks", "reason", "size_text"]

#: A resource that is busy for this part of the makespan is spoken of as busy all the time.
_ALL = 0.995


@dataclass(frozen=True)
class Reason:
    """Why a rank writes what it writes.

    Attributes
    ----------
    rank, nbytes, pieces : int
        The rank, what it writes, and in how many pieces.
    busy : tuple of (str, float)
        Each resource that its bytes pass, with the part of the makespan for which that is busy.
    bottleneck : str
        The busiest of these; empty if the rank writes nothing.
    text : str
        The reason, in a sentence or two.
    """

    rank: int
    nbytes: int
    pieces: int
    busy: tuple[tuple[str, float], ...]
    bottleneck: str
    text: str


def size_text(nbytes: float) -> str:
    """Return a size in decimal units, as rates are in them too."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if nbytes < 999.5 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def reason(plan: WriterPlan, rank: int) -> Reason:
    """Return why a rank writes what it writes."""
    forest = plan.placement.forest
    path = [k for k in forest.paths[forest.leaf[rank]].tolist() if k >= 0]
    span = plan.makespan
    busy = []
    for k in path:
        time = float(int(plan.load[k]) / max(int(forest.capacity[k]), 1))
        busy.append((forest.names[k], time / float(span) if span else 0.0))
    nbytes = int(plan.written[rank])
    count = int(np.count_nonzero(plan.pieces.rank == rank))
    top = max(range(len(path)), key=lambda i: (busy[i][1], i))
    text = _writer(plan, rank, path[top], busy[top][1]) if nbytes else _idle(plan, rank, path)
    bottleneck = busy[top][0] if nbytes else ""
    return Reason(rank, nbytes, count, tuple(busy), bottleneck, text)


def _writer(plan: WriterPlan, rank: int, k: int, part: float) -> str:
    forest = plan.placement.forest
    name, nbytes = forest.names[k], int(plan.written[rank])
    through = int(np.count_nonzero(plan.written[_ranks_under(plan, k)]))
    share = f"its {size_text(nbytes)} are {nbytes / max(int(plan.load[k]), 1):.1%} of that"
    rate = f"at {int(forest.capacity[k]) / 1000:g} GB/s"
    if not _shared(plan, rank):
        return (
            f"no other rank holds what rank {rank} writes; of its way {name} is the busiest, for "
            f"{part:.0%} of the plan's time"
        )
    if plan.tight[k] and part >= _ALL:
        return (
            f"{name} {rate} is one of the resources that set the bound T*: it is busy all the "
            f"time, with {size_text(int(plan.load[k]))} of {through} writers, and {share}"
        )
    if part >= _ALL:
        return f"{name} {rate} is busy until the end, for {through} writers, and {share}"
    return (
        f"{name} {rate} is the busiest on its way, for {part:.0%} of the plan's time, and {share}; "
        f"it has slack since other resources set the time"
    )


def _shared(plan: WriterPlan, rank: int) -> bool:
    """Whether another rank could write some of what this one writes."""
    slices = np.unique(plan.pieces.slice[plan.pieces.rank == rank])
    return bool((plan.slices.sets.sizes[plan.slices.set_of[slices]] > 1).any())


def _idle(plan: WriterPlan, rank: int, path: list[int]) -> str:
    forest, sets = plan.placement.forest, plan.slices.sets
    dead = [k for k in path if forest.capacity[k] == 0]
    if dead:
        return f"it writes nothing, since {forest.names[dead[-1]]} is excluded"
    owner = np.repeat(np.arange(len(sets)), sets.sizes)
    mine = np.zeros(len(sets), np.bool_)
    mine[owner[sets.ranks == rank]] = True
    held = np.flatnonzero(mine[plan.slices.set_of])
    if not len(held):
        return "it writes nothing, since it holds no slice"
    by = len(np.unique(plan.pieces.rank[np.isin(plan.pieces.slice, held)]))
    options = dict(plan.options)
    limits = [
        f"{name} is {options[name]}"
        for name, usual in (("unit", "replica"), ("max_writers", None), ("min_chunk", 0))
        if options[name] != usual
    ]
    why = f", as {' and '.join(limits)}" if limits else ", which have faster ways or less to write"
    return f"it writes nothing: the {len(held)} slices it holds are written by {by} others{why}"


def _ranks_under(plan: WriterPlan, k: int) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    forest = plan.placement.forest
    under: np.ndarray[tuple[int], np.dtype[np.bool_]] = (forest.paths == k).any(axis=1)[forest.leaf]
    return under


def bottlenecks(plan: WriterPlan, count: int = 5) -> tuple[str, ...]:
    """Return the names of the first resources that set the bound T*."""
    names = plan.placement.forest.names
    return tuple(names[k] for k in np.flatnonzero(plan.tight)[:count].tolist())
