"""Cutting many ranges into blocks of one size: the rows that a launch of a kernel works off."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["COLUMNS", "cut"]

#: Columns of a table, as the kernels expect them.
COLUMNS = 4

Int64s = NDArray[np.int64]


def cut(sizes: Int64s, block: int) -> tuple[Int64s, Int64s, Int64s]:
    """Cut ranges of `sizes` units into blocks of `block` units, the last of each perhaps smaller.

    Returns
    -------
    owners, starts, lengths : ndarray of int64
        For each block: the index of its range, its first unit in that range, and its units. A range
        without units has no block.
    """
    counts = -(-sizes // block)
    owners = np.repeat(np.arange(len(sizes), dtype=np.int64), counts)
    before = np.cumsum(counts) - counts
    starts = (np.arange(len(owners), dtype=np.int64) - before[owners]) * block
    return owners, starts, np.minimum(sizes[owners] - starts, block)
