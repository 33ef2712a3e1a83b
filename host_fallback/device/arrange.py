"""Compiled arranging: which bytes of a batch share a staging block, and where in it they lie.

Bytes that follow one another in a file follow one another in a block too, and lie in it as they do
in the file: equal modulo the file's granule. So the host path moves whole blocks with direct I/O,
however the tensors lie in GPU memory and however small they are. A request is cut only where its
file offset is a multiple of the granule, so that no granule is written from two blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tensorspill.jit import compiled

__all__ = ["PIECE", "RUN", "arrange", "bound"]

#: Bytes of one request that lie in one block: `place` in it, `addr` in GPU memory.
PIECE = np.dtype([("block", "i8"), ("place", "i8"), ("addr", "i8"), ("nbytes", "i8")])

#: Bytes of a block that lie in one range of a file.
RUN = np.dtype(
    [("block", "i8"), ("place", "i8"), ("file", "i8"), ("offset", "i8"), ("nbytes", "i8")]
)

Table = np.ndarray[Any, Any]


def bound(requests: Table, block_bytes: int, granule: int) -> int:
    """Return how many pieces `arrange` makes at most."""
    room = max(block_bytes - granule, granule)
    return int((requests["nbytes"] // room + 3).sum())


@compiled
def arrange(
    requests: Table, granules: Table, block_bytes: int, pieces: Table, runs: Table
) -> tuple[int, int]:
    """Fill `pieces` and `runs`, in the order of blocks; return how many there are of each.

    Parameters
    ----------
    requests : ndarray of `REQUEST`
        All reads or all writes, none without bytes.
    granules : ndarray of int64
        Of each file; they divide `block_bytes`.
    block_bytes : int
        Size of a staging block, which begins at a multiple of all granules.
    pieces, runs : ndarray of `PIECE`, of `RUN`
        With room for `bound` of each.
    """
    n_pieces, n_runs = 0, 0
    block, end = 0, 0
    for i in range(len(requests)):
        request = requests[i]
        granule = granules[request.file]
        offset, addr, left = request.offset, request.addr, request.nbytes
        while left > 0:
            run = runs[n_runs - 1]
            joins = (
                n_runs > 0
                and end > 0
                and run.file == request.file
                and run.offset + run.nbytes == offset
            )
            place = end if joins else end + (offset - end) % granule
            if place >= block_bytes:
                block, end = block + 1, 0
                continue
            length = min(left, block_bytes - place)
            if not joins:
                run = runs[n_runs]
                run.block, run.place, run.file = block, place, request.file
                run.offset, run.nbytes = offset, 0
                n_runs += 1
            run.nbytes += length
            # Never joined, even at neighbouring addresses: a copy must stay in one allocation.
            piece = pieces[n_pieces]
            piece.block, piece.place, piece.addr, piece.nbytes = block, place, addr, length
            n_pieces += 1
            offset, addr, left, end = offset + length, addr + length, left - length, place + length
            if end == block_bytes:
                block, end = block + 1, 0
    return n_pieces, n_runs
