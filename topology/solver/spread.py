"""A first guess of who writes what: in proportion to the part of the capacity that is each's."""

from __future__ import annotations

import numpy as np

from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.forest import Forest

__all__ = ["rate", "spread"]

#: Weights stay below this, so that a product with a sum of weights fits into 62 bits.
_LARGEST = 1 << 20


def rate(forest: Forest, used: Integers) -> Integers:
    """Return at which rate each resource could go on if all that are used did so, as weights.

    Parameters
    ----------
    forest : Forest
        The resources.
    used : array of int64
        Leaves at which bytes can enter.
    """
    in_use = np.zeros(len(forest.capacity), np.int64)
    in_use[used] = 1
    capacity = np.where((forest.load(in_use) > 0) & forest.alive, forest.capacity, 0)
    most = int(capacity.max(initial=1))
    shift = max(0, min(16, 60 - 2 * most.bit_length()))
    weight = np.zeros(len(capacity), np.int64)
    for depth, level in enumerate(forest.levels):
        own = capacity[level]
        if depth == 0:
            weight[level] = own << shift
            continue
        parent = forest.parent[level]
        siblings = np.zeros(len(capacity), np.int64)
        np.add.at(siblings, parent, own)
        total = np.maximum(siblings[parent], 1)
        whole, rest = np.divmod(weight[parent], total)
        part = whole * own + rest * own // total
        weight[level] = np.minimum(own << shift, part)
    drop = max(0, int(weight.max(initial=1)).bit_length() - _LARGEST.bit_length() + 1)
    found: Integers = np.where(capacity > 0, np.maximum(weight >> drop, 1), 0)
    return found


def spread(nbytes: Integers, begin: Integers, weight: Integers) -> Integers:
    """Return bytes for each member of each group, in proportion to their weights.

    Parameters
    ----------
    nbytes : array of int64
        Bytes of each group.
    begin : array of int64
        Group g has the members ``begin[g]`` to ``begin[g + 1]``, at least one of weight above 0.
    weight : array of int64
        Weight of each member.
    """
    if not len(nbytes):
        return np.zeros(0, np.int64)
    total = np.add.reduceat(weight, begin[:-1])
    size = np.diff(begin)
    whole, rest = np.divmod(nbytes, np.maximum(total, 1))
    given: Integers = np.repeat(whole, size) * weight + np.repeat(rest, size) * weight // np.repeat(
        np.maximum(total, 1), size
    )
    # What was rounded off goes to each group's heaviest member of those that come first.
    left = nbytes - np.add.reduceat(given, begin[:-1])
    first = begin[:-1].copy()
    heaviest = np.repeat(np.maximum.reduceat(weight, begin[:-1]), size)
    where = np.flatnonzero(weight == heaviest)
    first[np.searchsorted(begin, where, side="right")[::-1] - 1] = where[::-1]
    given[first] += left
    return given
