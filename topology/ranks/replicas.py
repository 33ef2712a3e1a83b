"""Sets of ranks that hold the same bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from tensorspill.errors import UnsupportedError
from tensorspill.topology.solver.arrays import Integers

__all__ = ["ReplicaSets"]


@dataclass(frozen=True, eq=False)
class ReplicaSets:
    """Sets of ranks, one after the other in one array.

    Parameters
    ----------
    begin : array of int64
        Set i is ``ranks[begin[i]:begin[i + 1]]``.
    ranks : array of int64
        The ranks of each set, growing.
    """

    begin: Integers
    ranks: Integers

    def __post_init__(self) -> None:
        for field in ("begin", "ranks"):
            array = np.array(getattr(self, field), np.int64)
            array.setflags(write=False)
            object.__setattr__(self, field, array)

    @classmethod
    def of(cls, sets: Iterable[Iterable[int]]) -> ReplicaSets:
        """Return the given sets; duplicates and order within one do not matter."""
        parts = [sorted(set(ranks)) for ranks in sets]
        begin = np.cumsum([0, *map(len, parts)])
        return cls(begin, np.array([rank for part in parts for rank in part], np.int64))

    @classmethod
    def rows(cls, table: npt.ArrayLike) -> ReplicaSets:
        """Return each row of a 2-D array as a set."""
        rows = np.sort(np.asarray(table, np.int64), axis=1)
        return cls(np.arange(len(rows) + 1) * rows.shape[1], rows.ravel())

    def __len__(self) -> int:
        return len(self.begin) - 1

    def __getitem__(self, index: int) -> Integers:
        return self.ranks[self.begin[index] : self.begin[index + 1]]

    def __iter__(self) -> Iterator[Integers]:
        return (self[i] for i in range(len(self)))

    @property
    def sizes(self) -> Integers:
        """How many ranks each set has."""
        return np.diff(self.begin)

    def take(self, sets: Integers) -> ReplicaSets:
        """Return some of the sets, in the order given."""
        size = self.sizes[sets]
        begin = np.concatenate(([0], np.cumsum(size)))
        offset = np.repeat(self.begin[sets] - begin[:-1], size)
        return ReplicaSets(begin, self.ranks[offset + np.arange(begin[-1])])

    def joined(self, *others: ReplicaSets) -> ReplicaSets:
        """Return these sets and then the others'."""
        everything: Sequence[ReplicaSets] = (self, *others)
        sizes = np.concatenate([sets.sizes for sets in everything])
        ranks = np.concatenate([sets.ranks for sets in everything])
        return ReplicaSets(np.concatenate(([0], np.cumsum(sizes))), ranks)

    def distinct(self) -> tuple[Integers, ReplicaSets]:
        """Return (for each set the number of the one equal to it, the different sets).

        The different sets are in the order of their first occurrence.
        """
        if not len(self):
            return np.zeros(0, np.int64), self
        keys = np.stack([_fold(self, salt) for salt in (1, 2)], axis=1)
        _, first, number = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        order = np.argsort(first, kind="stable")
        place = np.empty_like(order)
        place[order] = np.arange(len(order))
        number = place[number.ravel()]
        different = self.take(first[order])
        same = different.take(number)
        if not (np.array_equal(same.begin, self.begin) and np.array_equal(same.ranks, self.ranks)):
            return self._distinct_slowly()  # two different sets with equal keys
        return number, different

    def _distinct_slowly(self) -> tuple[Integers, ReplicaSets]:
        seen: dict[bytes, int] = {}
        number = [seen.setdefault(self[i].tobytes(), len(seen)) for i in range(len(self))]
        _, first = np.unique(number, return_index=True)
        return np.array(number, np.int64), self.take(first)

    def check(self, ranks: int, names: Sequence[str]) -> None:
        """Raise `UnsupportedError` for an empty set, or for a rank that does not exist."""
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            raise UnsupportedError(f"Slice {names[int(empty[0])]} has no replica")
        wrong = np.flatnonzero((self.ranks < 0) | (self.ranks >= ranks))
        if len(wrong):
            at = int(np.searchsorted(self.begin, wrong[0], side="right")) - 1
            raise UnsupportedError(
                f"Slice {names[at]} has rank {self.ranks[wrong[0]]} as a replica, but there are "
                f"{ranks} ranks"
            )


def _fold(sets: ReplicaSets, salt: int) -> npt.NDArray[np.uint64]:
    """Return a 64-bit key for each set, equal for equal sets."""
    mixed = sets.ranks.astype(np.uint64) + np.uint64(salt * 0x9E3779B97F4A7C15 % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    mixed ^= mixed >> np.uint64(31)
    total = np.concatenate((np.zeros(1, np.uint64), np.cumsum(mixed, dtype=np.uint64)))
    return cast("npt.NDArray[np.uint64]", total[sets.begin[1:]] - total[sets.begin[:-1]])
