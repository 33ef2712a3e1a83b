"""Kernels of the planner's flow: a maximum preflow, and bounds from one that is not finished.

Import this module only when a kernel is needed: it imports numba. Everything here is sequential
arithmetic on 64-bit integers, so that every machine computes the same plan.

A network is a list of arcs. Arc i goes from ``tail[i]`` to ``head[i]``; entry ``2 * i`` of
``residual`` is what more it can carry, entry ``2 * i + 1`` what can be sent back, which is what it
carries now. An entry of either parity is an *edge*; edge ``e ^ 1`` is its opposite.
"""

from __future__ import annotations

import numpy as np

from tensorspill.jit import compiled
from tensorspill.topology.solver.arrays import Array

__all__ = ["adjacency", "best_level", "maximise"]


@compiled
def adjacency(tail: Array, head: Array, nodes: int) -> tuple[Array, Array, Array]:
    """Return (start of each node's edges, edges by node, node that each edge leads to)."""
    arcs = len(tail)
    start = np.zeros(nodes + 1, np.int64)
    to = np.empty(2 * arcs, np.int32)
    for i in range(arcs):
        start[tail[i] + 1] += 1
        start[head[i] + 1] += 1
        to[2 * i] = head[i]
        to[2 * i + 1] = tail[i]
    for node in range(nodes):
        start[node + 1] += start[node]
    place = start[:-1].copy()
    edges = np.empty(2 * arcs, np.int32)
    for i in range(arcs):
        edges[place[tail[i]]] = 2 * i
        place[tail[i]] += 1
        edges[place[head[i]]] = 2 * i + 1
        place[head[i]] += 1
    return start, edges, to


@compiled
def _distances(
    start: Array, edges: Array, to: Array, residual: Array, label: Array, queue: Array
) -> None:
    """Set each node's label to its distance to the sink (the last node), or to the node count."""
    nodes = len(start) - 1
    sink = nodes - 1
    label[:] = nodes
    label[sink] = 0
    queue[0] = sink
    first, last = 0, 1
    while first < last:
        node = queue[first]
        first += 1
        for i in range(start[node], start[node + 1]):
            edge = edges[i]
            other = to[edge]
            if label[other] == nodes and residual[edge ^ 1] > 0:
                label[other] = label[node] + 1
                queue[last] = other
                last += 1


@compiled
def _line_up(label: Array, excess: Array, count: Array, stack: Array, below: Array) -> int:
    """Count the nodes at each label and stack those with excess; return the highest stack's label.

    ``stack[d]`` is a node of label d, ``below`` of it the next one, -1 the end.
    """
    nodes = len(label)
    count[:] = 0
    stack[:] = -1
    high = -1
    for node in range(nodes - 1):
        distance = label[node]
        count[distance] += 1
        if excess[node] > 0 and distance < nodes:
            below[node] = stack[distance]
            stack[distance] = node
            high = max(high, distance)
    return high


@compiled
def _raise(
    node: int,
    start: Array,
    edges: Array,
    to: Array,
    residual: Array,
    label: Array,
    count: Array,
) -> None:
    """Give a node the least label from which it can push on, or the node count if there is none."""
    nodes = len(label)
    lowest = nodes
    for i in range(start[node], start[node + 1]):
        edge = edges[i]
        if residual[edge] > 0:
            lowest = min(lowest, label[to[edge]] + 1)
    count[label[node]] -= 1
    if count[label[node]] == 0:
        lowest = nodes  # no node is left on any path from here to the sink
    label[node] = lowest
    count[lowest] += 1


@compiled
def maximise(
    start: Array,
    edges: Array,
    to: Array,
    residual: Array,
    excess: Array,
    label: Array,
    rounds: int,
) -> tuple[int, bool]:
    """Push all excess that can get there to the sink; return what is left, and whether it is done.

    The sink is the last node. The method is push-relabel, farthest excess first: on chains of
    replica sets, excess is carried along and grows on its way, where augmenting paths would each
    walk the chain again. `residual` and `excess` are changed in place and may come from an earlier
    call with less capacity. Afterwards `label` is each node's distance to the sink, or the node
    count where it can't be reached; once done, all excess left is at nodes of the latter kind, and
    the arcs from these to the others are a minimum cut. It may stop undone after so many `rounds`,
    of which each takes time in proportion to the network.
    """
    nodes = len(start) - 1
    sink = nodes - 1
    queue = np.empty(nodes, np.int32)
    count = np.zeros(nodes + 1, np.int64)
    stack = np.full(nodes + 1, -1, np.int32)
    below = np.empty(nodes, np.int32)
    patience = 2 * nodes + len(edges)
    made = 0
    while True:
        _distances(start, edges, to, residual, label, queue)
        current = start[:-1].copy()
        high = _line_up(label, excess, count, stack, below)
        if high < 0 or made == rounds:
            break
        made += 1
        work = 0
        while high >= 0 and work <= patience:
            node = stack[high]
            if node < 0:
                high -= 1
                continue
            stack[high] = below[node]
            while excess[node] > 0 and label[node] < nodes:
                if current[node] == start[node + 1]:
                    _raise(node, start, edges, to, residual, label, count)
                    current[node] = start[node]
                    work += start[node + 1] - start[node] + 12
                    continue
                edge = edges[current[node]]
                other = to[edge]
                if residual[edge] == 0 or label[other] != label[node] - 1:
                    current[node] += 1
                    continue
                pushed = min(excess[node], residual[edge])
                residual[edge] -= pushed
                residual[edge ^ 1] += pushed
                excess[node] -= pushed
                if other != sink and excess[other] == 0:
                    below[other] = stack[label[other]]
                    stack[label[other]] = other
                    high = max(high, label[other])
                excess[other] += pushed
                work += 1
    left = 0
    for node in range(sink):
        left += excess[node]
    return left, high < 0


@compiled
def _last_full(paths: Array, leaf: int, open_: Array) -> int:
    """Return the last resource above a leaf that is full, or its root if none is."""
    found = leaf
    full = False
    for level in range(paths.shape[1]):
        k = paths[leaf, level]
        if k < 0:
            break
        if open_[k] == 0:
            found, full = k, True
        elif not full:
            found = k
    return found


@compiled
def best_level(
    nbytes: Array,
    begin: Array,
    leaf: Array,
    paths: Array,
    order: Array,
    label: Array,
    open_: Array,
    slope: Array,
    fixed: Array,
) -> int:
    """Return the label for which the groups of at least that label need the most time.

    Groups are added in the given order, the highest label and so the farthest from the sink first,
    and with them the resources that their bytes must cross. Any such set gives a bound.
    """
    groups = len(begin) - 1
    crossed = np.zeros(len(slope), np.bool_)
    seen = np.zeros(len(slope), np.bool_)
    held, rate = 0, 0
    best, best_label = 0, 0
    for i in range(groups):
        g = order[i]
        held += nbytes[g]
        for j in range(begin[g], begin[g + 1]):
            if seen[leaf[j]]:
                continue
            seen[leaf[j]] = True
            k = _last_full(paths, leaf[j], open_)
            if not crossed[k]:
                crossed[k] = True
                rate += slope[k]
                held -= fixed[k]
        if (i + 1 == groups or label[order[i + 1]] < label[g]) and rate > 0:
            time = -((-held) // rate)
            if time > best:
                best, best_label = time, label[g]
    return best_label
