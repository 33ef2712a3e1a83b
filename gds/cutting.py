"""Cutting a batch into operations: neighbours joined, long requests cut, pages not shared."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorspill.engine.batch import REQUEST
from tensorspill.gds.options import PAGE
from tensorspill.pool.cuda.pointers import describe

__all__ = ["allocations", "cut", "join"]

Table = NDArray[Any]


def allocations(table: Table) -> tuple[Table, list[tuple[int, int]]]:
    """Return which allocation each request's memory is in.

    Needs a current context. The driver is asked once for each allocation.

    Returns
    -------
    index : ndarray of int64
        For each row, where in the list.
    ranges : list of (address, bytes)
        The allocations, by address; of memory that the driver does not know, what is asked for.
    """
    addresses = np.unique(table["addr"])
    ranges: list[tuple[int, int]] = []
    position = 0
    while position < len(addresses):
        address = int(addresses[position])
        info = describe(address)
        base, nbytes = (info.base, info.nbytes) if info.nbytes else (address, 1)
        ranges.append((base, nbytes))
        position = max(position + 1, int(np.searchsorted(addresses, base + nbytes)))
    bases = np.array([base for base, _ in ranges], "i8")
    return np.searchsorted(bases, table["addr"], side="right") - 1, ranges


def join(table: Table, allocation: Table) -> tuple[Table, Table]:
    """Join requests that are neighbours in the file, in memory and in one allocation.

    Parameters
    ----------
    table : ndarray of `REQUEST`
        No row is empty.
    allocation : ndarray of int64
        What `allocations` says.

    Returns
    -------
    table, allocation : ndarray
        The same for fewer, longer requests.
    """
    if len(table) < 2:
        return table, allocation
    before, after = table[:-1], table[1:]
    goes_on = (
        (before["addr"] + before["nbytes"] == after["addr"])
        & (before["offset"] + before["nbytes"] == after["offset"])
        & (before["file"] == after["file"])
        & (before["write"] == after["write"])
        & (allocation[:-1] == allocation[1:])
    )
    firsts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
    joined = table[firsts].copy()
    joined["nbytes"] = np.add.reduceat(table["nbytes"], firsts)
    return joined, allocation[firsts]


def cut(table: Table, block_bytes: int) -> tuple[Table, Table]:
    """Cut requests into operations of about `block_bytes`.

    Boundaries are at whole pages of the file. What a write has of its first and last page, if not
    all of it, becomes an operation of its own, which is small enough to go through the page cache:
    cuFile would read the page, change it and write it back, and with it undo what a neighbour
    writes meanwhile.

    Returns
    -------
    operations : ndarray of `REQUEST`
    origin : ndarray of int64
        The row of `table` that each comes from.
    """
    begin, end, origin = _apart(table)
    start = begin - begin % PAGE
    # A rest of less than a quarter is no operation of its own.
    count = np.maximum(1, -(-(end - start - block_bytes // 4) // block_bytes))
    row = np.repeat(np.arange(len(begin)), count)
    number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    low = np.maximum(begin[row], start[row] + number * block_bytes)
    last = number == count[row] - 1
    high = np.where(last, end[row], start[row] + (number + 1) * block_bytes)
    return _operations(table, origin[row], low, high)


def _apart(table: Table) -> tuple[Table, Table, Table]:
    """Return begin, end and row of each range once edges of writes are ranges of their own."""
    begin, end = table["offset"], table["offset"] + table["nbytes"]
    first, last = begin + -begin % PAGE, end - end % PAGE
    inner = (table["write"] != 0) & (first < last)
    head, tail = np.where(inner, first, end), np.where(inner, last, end)
    begins = np.stack([begin, head, tail], axis=1).ravel()
    ends = np.stack([head, tail, end], axis=1).ravel()
    used = begins < ends
    origin = np.repeat(np.arange(len(table)), 3)
    return begins[used], ends[used], origin[used]


def _operations(table: Table, origin: Table, low: Table, high: Table) -> tuple[Table, Table]:
    operations = np.empty(len(origin), REQUEST)
    source = table[origin]
    operations["addr"] = source["addr"] + (low - source["offset"])
    operations["offset"], operations["nbytes"] = low, high - low
    operations["file"], operations["write"] = source["file"], source["write"]
    return operations, origin
