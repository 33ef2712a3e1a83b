"""From bytes for each writer to ranges: where lines of slices are cut.

The slices that one group of ranks holds stand in one line, atom after atom, and the members of the
group take one stretch of it each, in the order of their ranks. So most atoms have one writer, and
only those on a border are cut, between two rows. With several copies the line is walked as many
times as there are copies; since no failure domain takes more than one length of it, no byte comes
twice into one domain.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.demand import Demand
from tensorspill.topology.writers.slices import Slices

__all__ = ["Lines", "Pieces"]


@dataclass(frozen=True, eq=False)
class Pieces:
    """Ranges of bytes of slices, sorted by slice, copy and first byte.

    Parameters
    ----------
    slice, rank, start, stop, copy : array of int64
        Rank ``rank[i]`` writes the bytes ``start[i]`` to ``stop[i]`` of slice ``slice[i]``, as copy
        number ``copy[i]``.
    """

    slice: Integers
    rank: Integers
    start: Integers
    stop: Integers
    copy: Integers

    @property
    def nbytes(self) -> Integers:
        """Bytes of each piece."""
        return self.stop - self.start

    def written(self, ranks: int) -> Integers:
        """Return how many bytes each of so many ranks writes."""
        total = np.zeros(ranks, np.int64)
        np.add.at(total, self.rank, self.nbytes)
        return total


class Lines:
    """Slices in lines, one for each group, with the places where they can be cut.

    Parameters
    ----------
    slices : Slices
        All slices.
    line_of : array of int64
        The line that each slice stands in.
    count : int
        Number of lines.
    block : int
        Atoms are cut at multiples of about this many bytes, and at whole rows.
    min_chunk : int
        Atoms below this size are not cut.
    """

    def __init__(
        self, slices: Slices, line_of: Integers, count: int, block: int, min_chunk: int = 0
    ) -> None:
        self.order = np.argsort(line_of, kind="stable")
        size = slices.nbytes[self.order]
        self.start = np.cumsum(size) - size  # of each slice, in the order of the lines
        self.nbytes = np.zeros(count, np.int64)
        np.add.at(self.nbytes, line_of, slices.nbytes)
        self.line = line_of[self.order]
        self.line_start = np.cumsum(self.nbytes) - self.nbytes
        atoms = np.diff(slices.atom_begin)[self.order]
        first = slices.atom_begin[:-1][self.order]
        place = np.arange(int(atoms.sum())) - np.repeat(np.cumsum(atoms) - atoms, atoms)
        atom = np.repeat(first, atoms) + place
        self.atom_bytes = slices.atom_bytes[atom]
        self.atom_start = np.cumsum(self.atom_bytes) - self.atom_bytes
        row = np.maximum(slices.row_bytes[atom], 1)
        self.quantum = row * np.maximum(block // row, 1)
        small = self.atom_bytes < min_chunk
        self.quantum[small] = np.maximum(self.atom_bytes[small], 1)

    def coarsest(self) -> Integers:
        """Return for each line by how much a stretch may differ from what was asked for."""
        found = np.ones(len(self.nbytes), np.int64)
        line = np.searchsorted(self.line_start, self.atom_start, side="right") - 1
        np.maximum.at(found, line, np.minimum(self.quantum, np.maximum(self.atom_bytes, 1)))
        return found

    def snap(self, position: Integers) -> Integers:
        """Return the nearest places at which lines can be cut, for places within all lines."""
        if not len(self.atom_start):
            return position
        atom = np.searchsorted(self.atom_start, position, side="right") - 1
        start, quantum = self.atom_start[atom], self.quantum[atom]
        steps = (position - start + quantum // 2) // quantum
        place: Integers = start + np.minimum(steps * quantum, self.atom_bytes[atom])
        return place

    def cut(self, demand: Demand, given: Integers) -> Pieces:
        """Return the pieces for members that are to write so many bytes each."""
        copies = demand.copies
        line = np.repeat(np.arange(len(demand.nbytes)), np.diff(demand.begin))
        once = np.maximum(demand.nbytes, 1)[line]
        taken = np.cumsum(given)
        until = taken - (taken - given)[demand.begin[:-1]][line]
        lap, rest = np.divmod(until, once)
        end = lap * once + self.snap(self.line_start[line] + rest) - self.line_start[line]
        end = np.minimum(end, copies * once)
        last = demand.begin[1:] - 1
        end[last] = copies * demand.nbytes
        begin = np.concatenate(([0], end[:-1]))
        begin[demand.begin[:-1]] = 0
        # From here on lines lie behind each other, each as often as there are copies.
        offset = copies * self.line_start[line]
        some = end > begin
        return self._split((begin + offset)[some], demand.ranks[some], copies)

    def _split(self, begin: Integers, ranks: Integers, copies: int) -> Pieces:
        """Return the pieces of stretches that begin there, each up to the next one."""
        size = np.diff(np.append(self.start, self.nbytes.sum()))
        some = size > 0
        order, line, inside = self.order[some], self.line[some], self.start[some]
        inside = inside - self.line_start[line]
        laps = np.arange(copies)
        place = copies * self.line_start[line] + inside
        place = (place[:, None] + laps * self.nbytes[line][:, None]).ravel()
        number, lap = np.repeat(order, copies), np.tile(laps, len(order))
        if copies > 1:
            by_place = np.argsort(place, kind="stable")
            place, number, lap = place[by_place], number[by_place], lap[by_place]
        cuts = np.sort(np.concatenate((begin, place)), kind="stable")
        cuts = cuts[np.diff(cuts, prepend=-1) > 0]
        ends = np.append(cuts[1:], copies * int(self.nbytes.sum()))
        at = np.searchsorted(place, cuts, side="right") - 1
        writer = np.searchsorted(begin, cuts, side="right") - 1
        start = cuts - place[at]
        found = Pieces(number[at], ranks[writer], start, start + (ends - cuts), lap[at])
        order = np.lexsort((found.start, found.copy, found.slice))
        return Pieces(*(getattr(found, name)[order] for name in Pieces.__dataclass_fields__))
