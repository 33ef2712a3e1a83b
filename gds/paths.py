"""The ways that bytes take: which one an operation goes, and the sums by way."""

from __future__ import annotations

from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorspill.engine.latencies import Latencies
from tensorspill.engine.statistics import PathStatistics
from tensorspill.gds.options import PAGE

__all__ = ["WHY", "Path", "classify", "sums"]

Table = NDArray[Any]


class Path(IntEnum):
    """What statistics count separately; the names are those of `PathStatistics`, with hyphens."""

    DIRECT = 0
    BOUNCE = 1
    COMPAT = 2
    BELOW_THRESHOLD = 3

    @property
    def label(self) -> str:
        """The name in statistics."""
        return self.name.lower().replace("_", "-")


#: Why bytes took a path.
WHY: dict[Path, str] = {
    Path.DIRECT: "straight between the drive and registered GPU memory",
    Path.BOUNCE: "through cuFile's own GPU buffers: not registered, or not whole pages",
    Path.COMPAT: "through host memory, by kvikio's or libcufile's compatibility mode",
    Path.BELOW_THRESHOLD: "through host memory, smaller than threshold_bytes",
}


def classify(
    operations: Table, compat: Table, registered: Table, threshold_bytes: int
) -> NDArray[np.int64]:
    """Return the path of each operation.

    Parameters
    ----------
    operations : ndarray of `REQUEST`
    compat, registered : ndarray of bool
        Whether the operation's file is in compatibility mode, and its memory registered.
    threshold_bytes : int
    """
    mixed = operations["addr"] | operations["offset"] | operations["nbytes"]
    direct = registered & (mixed % PAGE == 0)
    path = np.where(direct, Path.DIRECT, Path.BOUNCE)
    path[operations["nbytes"] < threshold_bytes] = Path.BELOW_THRESHOLD
    path[compat] = Path.COMPAT
    return path


def sums(
    operations: Table, path: Table, begun: Table, ended: Table, done: Table
) -> dict[str, PathStatistics]:
    """Return what was moved, by path.

    Parameters
    ----------
    operations : ndarray of `REQUEST`
    path : ndarray of int64
    begun, ended : ndarray of float64
        Seconds on one clock.
    done : ndarray of bool
        Operations that succeeded; the others count nowhere.
    """
    found = {}
    for kind in Path:
        rows = np.flatnonzero(done & (path == kind))
        if len(rows):
            nbytes, offset = operations["nbytes"][rows], operations["offset"][rows]
            pages = (offset + nbytes + -(offset + nbytes) % PAGE) - (offset - offset % PAGE)
            found[kind.label] = PathStatistics(
                nbytes=int(nbytes.sum()),
                io_bytes=int((nbytes if kind is Path.BELOW_THRESHOLD else pages).sum()),
                operations=len(rows),
                seconds=_busy(begun[rows], ended[rows]),
                slowest=float((ended[rows] - begun[rows]).max()),
                why=WHY[kind],
                latencies=Latencies.of(ended[rows] - begun[rows]),
            )
    return found


def _busy(begun: Table, ended: Table) -> float:
    """Return for how long at least one of several intervals lasted."""
    order = np.argsort(begun, kind="stable")
    begun, ended = begun[order], np.maximum.accumulate(ended[order])
    gaps = np.maximum(begun[1:] - ended[:-1], 0)
    return float(ended[-1] - begun[0] - gaps.sum())
