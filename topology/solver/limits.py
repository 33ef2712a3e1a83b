"""At most so many writers for a slice, and no writer with less than a minimum chunk of it.

Both make the question a combinatorial one. So a few writers are chosen for each slice, the largest
slices first and the idlest writers first; then the best time is found for these; and what falls
below the minimum chunk is given to others. The plan says how far it is from the bound T* of the
question without limits.
"""

from __future__ import annotations

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.demand import Demand
from tensorspill.topology.solver.forest import Forest

__all__ = ["keep_chunks", "most_writers", "restrict"]


def most_writers(
    nbytes: Integers, coarsest: Integers, copies: int, min_chunk: int, max_writers: int | None
) -> Integers:
    """Return how many writers each slice may have, at least one for each copy."""
    least = min_chunk + coarsest if min_chunk else np.ones_like(coarsest)
    most: Integers = np.maximum(copies * nbytes // least, copies)
    if max_writers is not None:
        if max_writers < copies:
            raise UnsupportedError(f"{copies} copies need more than {max_writers} writers a slice")
        most = np.minimum(most, max_writers)
    return most


def restrict(demand: Demand, forest: Forest, most: Integers) -> Demand:
    """Return the demand with at most so many members for each group."""
    from tensorspill.topology.solver.share_kernels import choose

    if (np.diff(demand.begin) <= most).all():
        return demand
    largest = np.lexsort((np.arange(len(most)), -demand.nbytes))
    kept = choose(
        largest,
        demand.nbytes,
        demand.begin,
        demand.leaf,
        demand.domain,
        most,
        demand.copies,
        forest.paths,
        forest.capacity,
    )
    group = np.repeat(np.arange(len(most)), np.diff(demand.begin))[kept]
    begin = np.searchsorted(group, np.arange(len(most) + 1))
    chosen = demand.ranks[kept], demand.leaf[kept]
    return Demand.of(demand.nbytes, begin, *chosen, demand.copies, demand.domain[kept])


def keep_chunks(demand: Demand, given: Integers, least: Integers) -> Integers:
    """Return bytes for each member that are 0 or at least its group's `least`.

    A group with fewer bytes than that gets one writer, or one for each copy.
    """
    given = given.copy()
    group = np.repeat(np.arange(len(least)), np.diff(demand.begin))
    short = np.unique(group[(given > 0) & (given < least[group])])
    for g in short:
        members = slice(int(demand.begin[g]), int(demand.begin[g + 1]))
        if demand.copies > 1:
            given[members] = _whole_copies(demand, given[members], members, int(g))
        else:
            given[members] = _at_least(given[members], int(least[g]))
    return given


def _at_least(given: Integers, least: int) -> Integers:
    """Drop the smallest shares until the others can have `least` each, and raise these to it."""
    total = int(given.sum())
    by_size = np.lexsort((np.arange(len(given)), -given))
    count = max(1, min(int((given > 0).sum()), total // least))
    share = np.zeros_like(given)
    share[by_size[:count]] = given[by_size[:count]]
    share[by_size[0]] += total - int(share.sum())
    if count > 1:
        share[by_size[:count]] = np.maximum(share[by_size[:count]], least)
        over = int(share.sum()) - total
        for i in by_size[:count]:  # the largest give first, and none falls below `least`
            back = min(over, int(share[i]) - least)
            share[i] -= back
            over -= back
    return share


def _whole_copies(demand: Demand, given: Integers, members: slice, group: int) -> Integers:
    """Let the domains that write most write one whole copy each, by one member."""
    domain = demand.domain[members]
    total = np.zeros(int(domain.max()) + 1, np.int64)
    np.add.at(total, domain, given)
    numbers = np.unique(domain)
    chosen = numbers[np.lexsort((numbers, -total[numbers]))][: demand.copies]
    share = np.zeros_like(given)
    for number in chosen:
        inside = np.flatnonzero(domain == number)
        share[inside[np.lexsort((inside, -given[inside]))[0]]] = demand.nbytes[group]
    return share
