"""Writers by unit: one for each machine, socket, NIC, … that has a replica of the slice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.sequences import Named
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.writers.slices import Slices

__all__ = ["Selection", "WriterShare", "select_writers"]


@dataclass(frozen=True)
class WriterShare:
    """One writer of a slice: number `index` of `count`, in the order of their ranks."""

    count: int
    index: int


@dataclass(frozen=True, eq=False)
class Selection:
    """Which ranks write each slice.

    Parameters
    ----------
    slices : Slices
        The slices.
    writers : ReplicaSets
        The writers of each of the slices' replica sets.
    """

    slices: Slices
    writers: ReplicaSets

    def share(self, rank: int, name: str) -> WriterShare | None:
        """Return a rank's share of a slice, or None if it does not write any of it."""
        return self._share(rank, self._numbers[name])

    def of(self, rank: int) -> dict[str, WriterShare]:
        """Return all shares of a rank, by the slices' names."""
        shares = ((j, self._share(rank, j)) for j in self._written_by(rank))
        return {self.slices.names[j]: share for j, share in shares if share is not None}

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.slices.names)}

    def _share(self, rank: int, number: int) -> WriterShare | None:
        writers = self.writers[int(self.slices.set_of[number])]
        index = int(np.searchsorted(writers, rank))
        if index == len(writers) or writers[index] != rank:
            return None
        return WriterShare(len(writers), index)

    def _written_by(self, rank: int) -> Iterator[int]:
        sets = np.repeat(np.arange(len(self.writers)), self.writers.sizes)
        mine = np.zeros(len(self.writers), np.bool_)
        mine[sets[self.writers.ranks == rank]] = True
        return iter(np.flatnonzero(mine[self.slices.set_of]).tolist())


def select_writers(slices: Slices, placement: Placement, unit: Unit | str) -> Selection:
    """Choose the writers of each slice from where its replicas really are.

    On each device that has replicas of a slice, the one of them writes that writes for the fewest
    sets of slices so far; of equals, the lowest rank. A slice with one replica is written by it,
    whatever the unit.

    Parameters
    ----------
    slices : Slices
        What is to be written.
    placement : Placement
        Where ranks are.
    unit : Unit or str
        Of what there is to be one writer.

    Raises
    ------
    UnsupportedError
        If a rank that holds a slice does not exist, or its device is unknown: the message names
        slice, rank and resource.
    """
    unit = Unit(unit)
    sets = slices.sets
    first = _first_slice(slices)
    sets.check(placement.ranks, Named(len(first), lambda i: slices.names[int(first[i])]))
    if unit is Unit.REPLICA:
        return Selection(slices, sets)
    device = _devices(slices, placement, unit, first)
    owner = np.repeat(np.arange(len(sets)), sets.sizes)
    order = np.lexsort((sets.ranks, device, owner))
    changes = (np.diff(owner[order], prepend=-1) != 0) | (np.diff(device[order], prepend=-1) != 0)
    starts = np.flatnonzero(changes)
    kept = _least_used(sets.ranks[order], np.append(starts, len(order)), placement.ranks)
    writer_of = owner[order][starts]
    by_set = np.lexsort((kept, writer_of))
    begin = np.searchsorted(writer_of[by_set], np.arange(len(sets) + 1))
    return Selection(slices, ReplicaSets(begin, kept[by_set]))


def _first_slice(slices: Slices) -> Integers:
    """Return a slice of each set, by which to call it."""
    first = np.zeros(len(slices.sets), np.int64)
    first[slices.set_of[::-1]] = np.arange(len(slices))[::-1]
    return first


def _devices(slices: Slices, placement: Placement, unit: Unit, first: Integers) -> Integers:
    """Return the device of each member of each set; unique slices need none."""
    sets = slices.sets
    if unit is Unit.NONE:
        return np.zeros(len(sets.ranks), np.int64)
    device = placement.where[unit][sets.ranks]
    shared = np.repeat(sets.sizes > 1, sets.sizes)
    unknown = np.flatnonzero(shared & (device < 0))
    if len(unknown):
        at = int(np.searchsorted(sets.begin, unknown[0], side="right")) - 1
        raise UnsupportedError(
            f"Slice {slices.names[int(first[at])]}: the {unit.value} of rank "
            f"{sets.ranks[unknown[0]]} is unknown, so there can't be one writer for each",
            remedy="Choose another unit, or say where that rank is",
        )
    return device


def _least_used(ranks: Integers, begin: Integers, count: int) -> Integers:
    """Return a rank of each stretch, the one chosen least often before."""
    chosen = np.empty(len(begin) - 1, np.int64)
    used = [0] * count
    every, bounds = ranks.tolist(), begin.tolist()
    for i, start in enumerate(bounds[:-1]):
        best = min(every[start : bounds[i + 1]], key=used.__getitem__)
        used[best] += 1
        chosen[i] = best
    return chosen
