"""Kernels that share out slack, and that choose a few writers of many.

Import this module only when a kernel is needed: it imports numba. As in the other kernels, all is
sequential arithmetic on 64-bit integers.
"""

from __future__ import annotations

import numpy as np

from tensorspill.jit import compiled
from tensorspill.topology.solver.arrays import Array

__all__ = ["choose", "share"]

#: Products of a load and a capacity, and shifted loads, stay below this.
_ROOM = 1 << 61


@compiled
def _scale(load: Array, capacity: Array) -> tuple[int, int]:
    """Return by how many bits a load may be shifted left, and by how many right for a product."""
    top_load, top_capacity = 1, 1
    for k in range(len(load)):
        top_load = max(top_load, load[k])
        top_capacity = max(top_capacity, capacity[k])
    room, drop = 0, 0
    while top_load < _ROOM >> (room + 1):
        room += 1
    while (top_load >> drop) > _ROOM // top_capacity:
        drop += 1
    return room, drop


@compiled
def _busy(path: Array, load: Array, capacity: Array, room: int) -> int:
    """Return how long the busiest resource on a path is busy, in units of 2**-room."""
    time = 0
    for k in path:
        if k < 0:
            break
        if capacity[k] > 0:
            time = max(time, (load[k] << room) // capacity[k])
    return time


@compiled
def _sort(key: Array, order: Array, spare: Array, size: int) -> None:
    """Put the numbers 0 to `size` into `order` by growing key, equal ones as they come."""
    for i in range(size):
        order[i] = i
    width = 1
    while width < size:
        for start in range(0, size, 2 * width):
            middle, stop = min(start + width, size), min(start + 2 * width, size)
            left, right = start, middle
            for i in range(start, stop):
                if right == stop or (left < middle and key[order[left]] <= key[order[right]]):
                    spare[i] = order[left]
                    left += 1
                else:
                    spare[i] = order[right]
                    right += 1
        for i in range(size):
            order[i] = spare[i]
        width *= 2


@compiled
def _on(k: int, path: Array) -> bool:
    found = False
    for other in path:
        found |= other == k
    return found


@compiled
def _to_move(
    give: Array, take: Array, load: Array, capacity: Array, limit: Array, drop: int
) -> int:
    """Return how many bytes to move from one path to another to make their busiest times meet.

    Above their common ancestor nothing changes. Of two resources, one of each path, the times meet
    after a step that follows from loads and capacities. The time of the first path is the largest
    of its resources', so it meets resource m of the other after the largest of the steps, and the
    whole other path after the smallest of those.
    """
    meet = 0
    for k in give:
        if k < 0 or _on(k, take):
            break
        least = _ROOM
        for m in take:
            if m < 0 or _on(m, give):
                break
            gain = (load[k] >> drop) * capacity[m] - (load[m] >> drop) * capacity[k]
            step = (gain // max(capacity[k] + capacity[m], 1)) << drop
            least = min(least, step, limit[m] - load[m])
        meet = max(meet, least)
    return meet


@compiled
def share(
    begin: Array,
    leaf: Array,
    given: Array,
    paths: Array,
    load: Array,
    capacity: Array,
    limit: Array,
    sweeps: int,
    grain: int,
) -> int:
    """Even out how long resources are busy, by moving bytes between the replicas of each group.

    Group g may use the leaves ``leaf[begin[g]:begin[g + 1]]`` and gives each ``given`` bytes. Each
    sweep visits the groups in turn: leaves are sorted by how long the busiest resource above them
    is busy, and bytes move from the busiest to the idlest, the second busiest to the second
    idlest and so on, as many as make the two equal. Nothing moves that would bring a resource above
    its `limit`. It ends after `sweeps`, or once a sweep moves less than `grain` bytes at a time.
    Returns the number of sweeps made; `given` and `load` are changed in place.
    """
    room, drop = _scale(load, capacity)
    longest = 0
    for g in range(len(begin) - 1):
        longest = max(longest, begin[g + 1] - begin[g])
    busy = np.empty(longest, np.int64)
    order = np.empty(longest, np.int64)
    spare = np.empty(longest, np.int64)
    for sweep in range(sweeps):
        largest = 0
        for g in range(len(begin) - 1):
            first, size = begin[g], begin[g + 1] - begin[g]
            if size < 2:
                continue
            for i in range(size):
                busy[i] = _busy(paths[leaf[first + i]], load, capacity, room)
            _sort(busy, order, spare, size)
            low, high = 0, size - 1
            while low < high:
                giver, taker = first + order[high], first + order[low]
                high -= 1
                if given[giver] == 0:
                    continue
                low += 1
                give, take = paths[leaf[giver]], paths[leaf[taker]]
                moved = min(given[giver], _to_move(give, take, load, capacity, limit, drop))
                if moved <= 0:
                    continue
                given[giver] -= moved
                given[taker] += moved
                for level in range(paths.shape[1]):
                    if give[level] >= 0:
                        load[give[level]] -= moved
                    if take[level] >= 0:
                        load[take[level]] += moved
                largest = max(largest, moved)
        if largest < grain:
            return sweep + 1
    return sweeps


@compiled
def _best_member(
    first: int,
    last: int,
    kept: Array,
    barred: Array,
    part: int,
    leaf: Array,
    paths: Array,
    load: Array,
    capacity: Array,
) -> int:
    """Return the member that would write `part` bytes soonest of those not kept and not barred."""
    best, least = -1, _ROOM
    for i in range(first, last):
        if kept[i] or barred[i - first]:
            continue
        time = 0
        for k in paths[leaf[i]]:
            if k < 0:
                break
            time = max(time, (load[k] + part) // max(capacity[k], 1))
        if time < least:
            best, least = i, time
    return best


@compiled
def choose(
    order: Array,
    nbytes: Array,
    begin: Array,
    leaf: Array,
    domain: Array,
    most: Array,
    copies: int,
    paths: Array,
    capacity: Array,
) -> Array:
    """Return which members to keep: at most ``most[g]`` of group g, from `copies` domains or more.

    Groups are taken in the given order. Each takes the members above which the busiest resource
    would be busy for the shortest time with an equal part of the group's bytes.
    """
    kept = np.zeros(len(leaf), np.uint8)
    load = np.zeros(len(capacity), np.int64)
    for g in order:
        first, last = begin[g], begin[g + 1]
        count = min(most[g], last - first)
        part = nbytes[g] * copies // max(count, 1)
        barred = np.zeros(last - first, np.uint8)
        for taken in range(count):
            if count == last - first:
                best = first + taken
            else:
                best = _best_member(first, last, kept, barred, part, leaf, paths, load, capacity)
            if best < 0:
                break
            kept[best] = 1
            for k in paths[leaf[best]]:
                if k >= 0:
                    load[k] += part
            if taken + 1 < copies:
                for i in range(first, last):
                    if domain[i] == domain[best]:
                        barred[i - first] = 1
            else:
                barred[:] = 0
    return np.flatnonzero(kept)
