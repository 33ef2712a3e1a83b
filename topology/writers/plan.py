"""The writer plan: for every slice, which ranks write which bytes; with its time and the bound."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorspill.topology.ranks.placement import Placement
from tensorspill.topology.solver.arrays import Flags, Integers
from tensorspill.topology.solver.forest import Forest
from tensorspill.topology.writers.pieces import Pieces
from tensorspill.topology.writers.slices import Slices

if TYPE_CHECKING:
    from tensorspill.topology.writers.explain import Reason

__all__ = ["Box", "Piece", "WriterPlan", "longest"]


@dataclass(frozen=True)
class Piece:
    """Bytes `start` to `stop` of a slice, written by a rank as copy number `copy`."""

    slice: str
    rank: int
    start: int
    stop: int
    copy: int

    @property
    def nbytes(self) -> int:
        """Its size."""
        return self.stop - self.start


@dataclass(frozen=True)
class Box:
    """Rows `first` to `last` (not included) of an atom."""

    slice: str
    atom: str
    first: int
    last: int
    row_bytes: int
    copy: int


@dataclass(frozen=True, eq=False)
class WriterPlan:
    """Who writes what. Frozen, and the same on every rank that was given the same.

    Parameters
    ----------
    slices, placement
        What the plan is for.
    pieces : Pieces
        All ranges.
    lower_bound : Fraction
        T* in microseconds: no plan can be faster. With `relaxed` it is the bound of the question
        without limits, copies or units, and may be out of reach.
    relaxed : bool
        Whether the plan obeys more than the bound knows of.
    tight : array of bool
        The resources that T* comes from.
    options : tuple
        The question, apart from slices and placement.
    planning_s : float
        How long planning took; not part of the digest.
    """

    slices: Slices
    placement: Placement
    pieces: Pieces
    lower_bound: Fraction
    relaxed: bool
    tight: Flags
    options: tuple[tuple[str, Any], ...]
    planning_s: float = field(default=0.0)

    @cached_property
    def written(self) -> Integers:
        """Bytes that each rank writes."""
        return self.pieces.written(self.placement.ranks)

    @cached_property
    def load(self) -> Integers:
        """Bytes through each resource."""
        return self.placement.forest.rank_load(self.written)

    @cached_property
    def makespan(self) -> Fraction:
        """Microseconds until the last byte is written, if each resource keeps its rate."""
        return longest(self.placement.forest, self.load)

    @property
    def makespan_s(self) -> float:
        """The makespan in seconds."""
        return float(self.makespan) / 1e6

    @property
    def lower_bound_s(self) -> float:
        """T* in seconds."""
        return float(self.lower_bound) / 1e6

    @property
    def gap(self) -> float:
        """By which part the makespan is above the bound."""
        return float(self.makespan / self.lower_bound) - 1 if self.lower_bound else 0.0

    @property
    def writers(self) -> tuple[int, ...]:
        """The ranks that write anything."""
        return tuple(np.flatnonzero(self.written).tolist())

    @cached_property
    def digest(self) -> str:
        """128 bits, as hexadecimal digits, over the question and the answer."""
        forest = self.placement.forest
        known = hashlib.blake2b(digest_size=16)
        head = ("tensorspill.plan.1", self.options, self.lower_bound.as_integer_ratio())
        known.update(repr(head).encode())
        known.update("\0".join(self.slices.names).encode())
        known.update("\0".join(self.slices.atom_names).encode())
        sets = self.slices.sets
        for array in (
            *(self.slices.set_of, self.slices.atom_begin, self.slices.rows, self.slices.row_bytes),
            *(sets.begin, sets.ranks, forest.capacity, forest.parent, forest.leaf),
            *(getattr(self.pieces, name) for name in Pieces.__dataclass_fields__),
        ):
            known.update(len(array).to_bytes(8, "little"))
            known.update(np.ascontiguousarray(array, "<i8").data)
        return known.hexdigest()

    def pieces_of(self, rank: int) -> tuple[Piece, ...]:
        """Return what a rank writes, by slice, copy and first byte; empty if it writes nothing."""
        return tuple(self._pieces(np.flatnonzero(self.pieces.rank == rank)))

    def pieces_in(self, name: str) -> tuple[Piece, ...]:
        """Return all pieces of a slice, by copy and first byte."""
        return tuple(self._pieces(np.flatnonzero(self.pieces.slice == self.slices.number(name))))

    def _pieces(self, numbers: Integers) -> Iterator[Piece]:
        every = self.pieces
        for i in numbers.tolist():
            start, stop = int(every.start[i]), int(every.stop[i])
            name = self.slices.names[int(every.slice[i])]
            yield Piece(name, int(every.rank[i]), start, stop, int(every.copy[i]))

    def boxes_of(self, rank: int) -> tuple[Box, ...]:
        """Return the rows of each atom that a rank writes."""
        return tuple(self._boxes(rank))

    def _boxes(self, rank: int) -> Iterator[Box]:
        slices, every = self.slices, self.pieces
        for i in np.flatnonzero(every.rank == rank).tolist():
            j, copy = int(every.slice[i]), int(every.copy[i])
            at = 0
            for a in range(int(slices.atom_begin[j]), int(slices.atom_begin[j + 1])):
                size, row = int(slices.atom_bytes[a]), int(slices.row_bytes[a])
                first = max(int(every.start[i]), at) - at
                last = min(int(every.stop[i]), at + size) - at
                at += size
                if first < last:
                    name = slices.names[j], slices.atom_names[a]
                    yield Box(*name, first // row, last // row, row, copy)

    def reason(self, rank: int) -> Reason:
        """Return why a rank writes what it writes."""
        from tensorspill.topology.writers.explain import reason

        return reason(self, rank)

    def share(self, rank: int, name: str) -> tuple[int, int] | None:
        """Return (number of writers, index of this one among them), or None for non-writers."""
        mine = self.pieces.slice == self.slices.number(name)
        writers = np.unique(self.pieces.rank[mine])
        index = int(np.searchsorted(writers, rank))
        if index == len(writers) or writers[index] != rank:
            return None
        return len(writers), index


def longest(forest: Forest, load: Integers) -> Fraction:
    """Return the time, in microseconds, that the busiest resource needs for its load, exactly."""
    used = np.flatnonzero(load)
    if not len(used):
        return Fraction(0)
    time = load[used] / np.maximum(forest.capacity[used], 1)
    near = used[time >= time.max() * (1 - 1e-9)]
    pairs = {(int(load[k]), int(forest.capacity[k])) for k in near}
    return max(Fraction(nbytes, max(rate, 1)) for nbytes, rate in pairs)
