"""Resources that writers share: a forest of capacities, from ranks' streams up to the drives."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tensorspill.errors import UnsupportedError
from tensorspill.topology.solver.arrays import Flags, Integers

__all__ = ["MAX_CAPACITY", "Forest"]

#: The largest capacity in MB/s; products of two capacities then fit into 62 bits.
MAX_CAPACITY = 1 << 31


@dataclass(frozen=True, eq=False)
class Forest:
    """Resources with capacities; the bytes that a rank writes pass through all above its leaf.

    Parameters
    ----------
    capacity : array of int64
        Whole MB/s, which is bytes a microsecond, for each resource. 0 only for excluded ones.
    parent : array of int64
        The resource that each one feeds into, or -1 for the last.
    leaf : array of int64
        The first resource that each rank's bytes pass through.
    names : sequence of str
        What to call each resource in errors and explanations; may be computed on access.

    Raises
    ------
    UnsupportedError
        If a capacity is negative or too large, a parent does not exist, or parents form a cycle.
    """

    capacity: Integers
    parent: Integers
    leaf: Integers
    names: Sequence[str]

    def __post_init__(self) -> None:
        for field in ("capacity", "parent", "leaf"):
            array = np.array(getattr(self, field), np.int64)
            array.setflags(write=False)
            object.__setattr__(self, field, array)
        self._check()

    def _check(self) -> None:
        count = len(self.capacity)
        if len(self.parent) != count or len(self.names) != count:
            raise UnsupportedError(
                f"{count} capacities, {len(self.parent)} parents and {len(self.names)} names"
            )
        wrong = np.flatnonzero((self.capacity < 0) | (self.capacity > MAX_CAPACITY))
        if len(wrong):
            k = int(wrong[0])
            raise UnsupportedError(
                f"Resource {self.names[k]} has a capacity of {self.capacity[k]} MB/s",
                remedy=f"Capacities are 1 to {MAX_CAPACITY} MB/s; exclude a resource that is dead",
            )
        if len(self.parent) and not (self.parent.min() >= -1 and self.parent.max() < count):
            raise UnsupportedError("A resource has a parent that does not exist")
        outside = np.flatnonzero((self.leaf < 0) | (self.leaf >= count))
        if len(outside):
            raise UnsupportedError(f"Rank {outside[0]} has no resource to write through")
        _ = self.depth

    @cached_property
    def depth(self) -> Integers:
        """How many resources lie above each one."""
        depth = np.zeros(len(self.parent), np.int64)
        above = self.parent
        while (further := above >= 0).any():
            depth[further] += 1
            if depth.max() > len(self.parent):
                k = int(depth.argmax())
                raise UnsupportedError(f"Resource {self.names[k]} is above itself")
            above = np.where(further, self.parent[np.maximum(above, 0)], -1)
        return depth

    @cached_property
    def levels(self) -> tuple[Integers, ...]:
        """The resources at each depth, the roots first."""
        order = np.argsort(self.depth, kind="stable")
        count = np.bincount(self.depth)
        return tuple(np.split(order, np.cumsum(count)[:-1])) if len(count) else ()

    @cached_property
    def paths(self) -> npt.NDArray[np.int32]:
        """For each resource, itself and those above it up to its root, then -1."""
        paths = np.full((len(self.parent), len(self.levels)), -1, np.int32)
        at = np.arange(len(self.parent))
        for level in range(paths.shape[1]):
            paths[:, level] = at
            at = np.where(at >= 0, self.parent[np.maximum(at, 0)], -1)
        return paths

    @cached_property
    def alive(self) -> Flags:
        """Whether bytes can pass through each resource and all above it."""
        alive = self.capacity > 0
        for level in self.levels[1:]:
            alive[level] &= alive[self.parent[level]]
        return alive

    def load(self, at_leaf: Integers) -> Integers:
        """Return the bytes through each resource, given the bytes that enter at each."""
        load = np.array(at_leaf, np.int64)
        for level in self.levels[:0:-1]:
            np.add.at(load, self.parent[level], load[level])
        return load

    def rank_load(self, written: Integers) -> Integers:
        """Return the bytes through each resource, given the bytes that each rank writes."""
        at_leaf = np.zeros(len(self.capacity), np.int64)
        np.add.at(at_leaf, self.leaf, written)
        return self.load(at_leaf)

    def without(self, excluded: Iterable[str | int]) -> Forest:
        """Return the same forest in which these resources, by name or number, carry nothing."""
        capacity = self.capacity.copy()
        numbers = {name: k for k, name in enumerate(self.names)}
        for item in excluded:
            k = numbers.get(item) if isinstance(item, str) else item
            if k is None or not 0 <= k < len(capacity):
                raise UnsupportedError(
                    f"There is no resource {item!r} to exclude",
                    remedy=f"Names look like {', '.join(self.names[:1])}, {self.names[-1]}",
                )
            capacity[k] = 0
        return Forest(capacity, self.parent, self.leaf, self.names)
