"""A forest of resources from levels: the switch, array and file system that each rank uses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.topology.sequences import Joined
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.forest import Forest

__all__ = ["Level", "nest"]


@dataclass(frozen=True, eq=False)
class Level:
    """Resources of one kind.

    Parameters
    ----------
    kind : str
        ``"switch"``, ``"nvme"``, …
    of : array of int64
        The number of the resource of this kind that each rank writes through; -1 if there is none.
    capacity : array of int64
        MB/s of each resource.
    names : sequence of str
        One for each resource.
    """

    kind: str
    of: Integers
    capacity: Integers
    names: Sequence[str]


def nest(levels: list[Level]) -> tuple[Forest, tuple[tuple[str, int], ...], tuple[str, ...]]:
    """Return (the forest, the kinds of resources in it, notes about levels left out).

    The first level is the ranks' own streams. What counts of the others is only which ranks share a
    resource, so the level with the most resources comes next to the ranks, and so on. A level is
    left out if it does not nest: if ranks that share one of its resources part again above it.

    With each kind comes the number of the first resource after those of that kind.

    Raises
    ------
    UnsupportedError
        If a capacity is zero or below.
    """
    notes: list[str] = []
    kept: list[Level] = []
    by_number = sorted(levels[1:], key=lambda level: len(np.unique(level.of)), reverse=True)
    for level in (levels[:1] + by_number)[::-1]:
        _positive(level)
        crossing = _crossing(level, kept[::-1])
        if crossing is None:
            kept.append(level)
        else:
            notes.append(
                f"{level.kind} is left out of the plan: the ranks of {level.names[crossing]} "
                f"do not all go on to the same resource"
            )
    kept.reverse()
    ends = np.cumsum([len(level.capacity) for level in kept]).tolist()
    kinds = tuple((level.kind, int(end)) for level, end in zip(kept, ends, strict=True))
    return _join(kept), kinds, tuple(notes[::-1])


def _positive(level: Level) -> None:
    wrong = np.flatnonzero(level.capacity < 1)
    if len(wrong):
        k = int(wrong[0])
        raise UnsupportedError(
            f"Resource {level.names[k]} has a capacity of {level.capacity[k]} MB/s",
            remedy="Capacities are 1 MB/s or more; exclude a resource that is dead",
        )


def _next(levels: Sequence[Level], ranks: int) -> Integers:
    """Return for each rank the first resource that it meets, numbered over all levels, or -1."""
    first = np.full(ranks, -1, np.int64)
    at = sum(len(level.capacity) for level in levels)
    for level in levels[::-1]:
        at -= len(level.capacity)
        first = np.where(level.of >= 0, at + level.of, first)
    return first


def _parents(level: Level, above: Sequence[Level]) -> tuple[Integers, Integers]:
    """Return the lowest and the highest number of what follows each resource, over its ranks."""
    towards = _next(above, len(level.of))
    through = level.of >= 0
    low = np.full(len(level.capacity), np.iinfo(np.int64).max)
    high = np.full(len(level.capacity), -1, np.int64)
    np.minimum.at(low, level.of[through], towards[through])
    np.maximum.at(high, level.of[through], towards[through])
    return low, high


def _crossing(level: Level, above: Sequence[Level]) -> int | None:
    low, high = _parents(level, above)
    wrong = np.flatnonzero((low < high) & (low != np.iinfo(np.int64).max))
    return int(wrong[0]) if len(wrong) else None


def _join(levels: Sequence[Level]) -> Forest:
    parents = []
    first = np.cumsum([len(level.capacity) for level in levels])
    for i, level in enumerate(levels):
        above = _parents(level, levels[i + 1 :])[1]
        parents.append(np.where(above >= 0, above + first[i], -1))
    return Forest(
        np.concatenate([level.capacity for level in levels]),
        np.concatenate(parents),
        levels[0].of,
        Joined(*(level.names for level in levels)),
    )
