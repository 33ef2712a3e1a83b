"""Tables shared by Python and the compiled loops: files, segments, slots and jobs.

Plain numpy record types, without numba, so that importing the engine stays light.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

__all__ = ["FILE", "JOB", "SEGMENT", "SLOT", "WHY", "Mode", "Path"]


class Mode(IntEnum):
    """How the bytes of a segment move."""

    #: Between the file and the caller's memory, by AIO.
    DIRECT = 0
    #: Through a staging block, by AIO.
    STAGED = 1
    #: Through the page cache, by pread and pwrite.
    BUFFERED = 2


class Path(IntEnum):
    """What statistics count separately; the names are those of `PathStatistics`."""

    DIRECT = 0
    STAGED = 1
    PACKED = 2
    EDGE = 3
    BUFFERED = 4
    REFUSED = 5


#: Why bytes took a path.
WHY: dict[Path, str] = {
    Path.DIRECT: "straight between the file and the caller's memory",
    Path.STAGED: "the memory address is not aligned as O_DIRECT needs it",
    Path.PACKED: "small neighbours in the file, gathered in one block",
    Path.EDGE: "head or tail of a range that is not whole blocks",
    Path.BUFFERED: "the file is not open for O_DIRECT",
    Path.REFUSED: "the file system refused a direct operation, or ended it in mid-block",
}

#: A file of a batch. `direct` is -1 without O_DIRECT; `buffered` is negative until it is needed,
#: when a ring opens what `held` is open for, with `flags`; `granule` is the unit of whole blocks in
#: bytes; `exclusive` is 1 if blocks are never shared between requests, so that writes may pad.
FILE = np.dtype(
    [
        ("direct", "i4"),
        ("buffered", "i4"),
        ("held", "i4"),
        ("flags", "i4"),
        ("memory", "i8"),
        ("granule", "i8"),
        ("exclusive", "i8"),
    ]
)

#: A range of a file that moves in one mode. `addr` is the caller's memory at `offset` unless
#: staged; `first` and `last` are the requests inside it; `useful` is where their last byte ends.
SEGMENT = np.dtype(
    [
        ("mode", "i4"),
        ("path", "i4"),
        ("file", "i4"),
        ("write", "i4"),
        ("addr", "i8"),
        ("offset", "i8"),
        ("nbytes", "i8"),
        ("useful", "i8"),
        ("first", "i8"),
        ("last", "i8"),
    ]
)

#: An operation under way, of one or more `pieces` of memory (see `Ring.vectors`), the first at
#: `addr`. `want` is how many of `nbytes` must be moved for success; `staging` is
#: -1 or the staging block; copying begins at `request` and ends at `last`. `begun` is a time in ns.
SLOT = np.dtype(
    [
        ("job", "i4"),
        ("path", "i4"),
        ("file", "i4"),
        ("write", "i4"),
        ("pieces", "i8"),
        ("staging", "i8"),
        ("addr", "i8"),
        ("offset", "i8"),
        ("nbytes", "i8"),
        ("want", "i8"),
        ("useful", "i8"),
        ("request", "i8"),
        ("last", "i8"),
        ("begun", "i8"),
    ]
)

#: A batch, or a worker's part of one, that a ring works on. The first fields are addresses of
#: tables, then cursors, then the outcome. `queued` is 1 while blocks may be left to start, and
#: `error` an errno, 0 without one.
JOB = np.dtype(
    [
        ("requests", "i8"),
        ("files", "i8"),
        ("segments", "i8"),
        ("cancel", "i8"),
        ("n_segments", "i8"),
        ("segment", "i8"),
        ("position", "i8"),
        ("request", "i8"),
        ("queued", "i8"),
        ("in_flight", "i8"),
        ("finished", "i8"),
        ("dropped", "i8"),
        ("error", "i8"),
        ("error_file", "i8"),
        ("error_offset", "i8"),
        ("error_nbytes", "i8"),
    ]
)
