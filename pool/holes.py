"""Free ranges of an address space, sorted by address, no two of them touching."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["Holes"]

Int64s = NDArray[np.int64]


class Holes:
    """A sorted table of free ranges that coalesces.

    Kept as one array because scanning or shifting 20,000 sizes in numpy takes some microseconds,
    less than the steps of a balanced tree in Python.
    """

    __slots__ = ("_count", "_table")

    def __init__(self) -> None:
        self._table = np.empty((2, 64), np.int64)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def starts(self) -> Int64s:
        """Where the holes begin, ascending; a view that the next change makes stale."""
        return self._table[0, : self._count]

    @property
    def sizes(self) -> Int64s:
        """How large they are; a view that the next change makes stale."""
        return self._table[1, : self._count]

    @property
    def largest(self) -> int:
        """Size of the largest hole; 0 if there is none."""
        return int(self.sizes.max()) if self._count else 0

    def first_fit(self, size: int) -> int | None:
        """Return the index of the lowest-addressed hole of at least `size`."""
        fits = self.sizes >= size
        index = int(fits.argmax()) if self._count else 0
        return index if self._count and fits[index] else None

    def add(self, start: int, size: int) -> None:
        """Add a range, joined with the holes that touch it."""
        table, count = self._table, self._count
        index = int(self.starts.searchsorted(start))
        joins_left = index > 0 and int(table[0, index - 1] + table[1, index - 1]) == start
        joins_right = index < count and int(table[0, index]) == start + size
        if joins_left:
            table[1, index - 1] += size
            if joins_right:
                table[1, index - 1] += table[1, index]
                self._delete(index)
        elif joins_right:
            table[:, index] = start, int(table[1, index]) + size
        else:
            self._insert(index, start, size)

    def take(self, index: int, start: int, size: int) -> None:
        """Cut ``[start, start + size)`` out of the hole at `index`."""
        before = start - int(self._table[0, index])
        after = int(self._table[1, index]) - before - size
        if before and after:
            self._insert(index + 1, start + size, after)
        if before:
            self._table[1, index] = before
        elif after:
            self._table[:, index] = start + size, after
        else:
            self._delete(index)

    def _insert(self, index: int, start: int, size: int) -> None:
        count = self._count
        if count == self._table.shape[1]:
            grown = np.empty((2, 2 * count), np.int64)
            grown[:, :count] = self._table
            self._table = grown
        self._table[:, index + 1 : count + 1] = self._table[:, index:count]
        self._table[:, index] = start, size
        self._count = count + 1

    def _delete(self, index: int) -> None:
        self._table[:, index : self._count - 1] = self._table[:, index + 1 : self._count]
        self._count -= 1
