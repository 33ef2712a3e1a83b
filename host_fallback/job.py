"""A job: a batch, or one worker's part of it, with the tables that the ring reads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from tensorspill.engine.batch import Batch
from tensorspill.engine.latencies import Latencies
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.statistics import PathStatistics
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import BrokenError
from tensorspill.host_fallback.file import AioFile
from tensorspill.host_fallback.layout import SEGMENT, WHY, Path

__all__ = ["Job", "Progress", "split"]

Table = NDArray[Any]


class Progress:
    """Joins the parts of a batch: ends the transfer when the last part has ended."""

    def __init__(self, ledger: Ledger, batch: Batch, transfer: Transfer) -> None:
        self._ledger = ledger
        self._batch = batch
        self._transfer = transfer
        self._lock = threading.Lock()
        self._left = 1
        self._error: BaseException | None = None
        self._paths: dict[str, PathStatistics] = {}
        #: Read by the rings between blocks; 1 once the rest is to be dropped.
        self.cancel = np.zeros(1, "i8")

    def stop(self) -> None:
        """Drop the blocks that have not started."""
        self.cancel[0] = 1

    def expect(self, parts: int) -> None:
        """Say how many parts there are, before any is handed to a worker."""
        self._left = parts

    def part_ended(
        self, error: BaseException | None, paths: Sequence[tuple[Path, PathStatistics]]
    ) -> None:
        """Account one part; an error stops the other parts."""
        with self._lock:
            self._left -= 1
            if error is not None:
                self.stop()
                if self._error is None or isinstance(self._error, CancelledError):
                    self._error = error
            for path, moved in paths:
                name = path.name.lower()
                known = self._paths.get(name)
                self._paths[name] = moved if known is None else known + moved
            if self._left:
                return
        self._ledger.end(self._transfer, self._error, self._paths)

    def adopt(self, file: int, fd: int) -> None:
        """Give one of the batch's files a descriptor without O_DIRECT."""
        cast(AioFile, self._batch.files[file]).descriptors.adopt(fd)

    def error(self, code: int, file: int, offset: int, nbytes: int, write: bool) -> BrokenError:
        """Return the error for an errno at a place in one of the batch's files."""
        action = "Write" if write else "Read"
        path = self._batch.files[file].path
        return BrokenError.from_errno(
            code, f"{action} failed", path=path, offset=offset, nbytes=nbytes
        )


class Job:
    """What one worker does of a batch.

    Attributes
    ----------
    requests, files, segments : ndarray
        Of `REQUEST`, `FILE` and `SEGMENT`; the ring reads them by address while the job lives.
    """

    def __init__(self, requests: Table, files: Table, progress: Progress) -> None:
        self.requests = requests
        self.files = files
        self.progress = progress
        self.segments: Table = np.zeros(0, SEGMENT)
        self._lacking = files["buffered"] < 0

    def cut(self, cutter: Callable[[Table, Table, Table, int], int], pack_below: int) -> None:
        """Fill `segments`; runs in the worker, since it needs the compiled cutter."""
        segments = np.zeros(3 * len(self.requests) + 1, SEGMENT)
        self.segments = segments[: cutter(self.requests, self.files, segments, pack_below)]

    def enter(self, row: Any) -> None:
        """Describe the job in a `JOB` record."""
        row["requests"], row["files"] = self.requests.ctypes.data, self.files.ctypes.data
        row["segments"], row["n_segments"] = self.segments.ctypes.data, len(self.segments)
        row["cancel"] = self.progress.cancel.ctypes.data
        for field in ("segment", "position", "request", "in_flight", "finished", "dropped"):
            row[field] = 0
        row["error"] = 0
        row["queued"] = 1

    def leave(
        self, row: Any, moved: Table, busy: dict[Path, float], latencies: dict[Path, Latencies]
    ) -> None:
        """Read the outcome from the record and account it."""
        self._hand_over()
        paths = [
            (path, _path_statistics(path, counts, busy[path], latencies.get(path)))
            for path, counts in zip(Path, moved.tolist(), strict=True)
            if any(counts)
        ]
        error: BaseException | None = None
        if row["error"]:
            at = int(row["error_offset"])
            error = self.progress.error(
                int(row["error"]),
                int(row["error_file"]),
                at,
                int(row["error_nbytes"]),
                self._writes_at(int(row["error_file"]), at),
            )
        elif row["dropped"]:
            error = CancelledError("The transfer was cancelled")
        self.progress.part_ended(error, paths)

    def fail(self, error: BaseException) -> None:
        """End the job without its having run to its end."""
        self._hand_over()
        self.progress.part_ended(error, ())

    def _hand_over(self) -> None:
        """Give files the descriptors that a ring has opened for them."""
        opened = self._lacking & (self.files["buffered"] >= 0)
        self._lacking &= ~opened
        for number in np.flatnonzero(opened).tolist():
            self.progress.adopt(number, int(self.files["buffered"][number]))

    def _writes_at(self, file: int, offset: int) -> bool:
        segments = self.segments
        hit = (
            (segments["file"] == file)
            & (segments["offset"] <= offset)
            & (offset < segments["offset"] + segments["nbytes"])
        )
        return bool(segments["write"][hit].any())


def _path_statistics(
    path: Path, counts: list[int], seconds: float, latencies: Latencies | None
) -> PathStatistics:
    nbytes, io_bytes, operations, slowest = counts
    return PathStatistics(
        nbytes,
        io_bytes,
        operations,
        seconds,
        slowest / 1e9,
        WHY[path],
        latencies or Latencies(),
    )


def split(requests: Table, parts: int, block_bytes: int) -> list[Table]:
    """Divide requests into at most `parts` tables of about equal bytes, in order.

    A request is cut only where its file offset is a multiple of `block_bytes`, so that two workers
    never share a page of a file.
    """
    sizes = requests["nbytes"]
    share = max(block_bytes, -(-int(sizes.sum()) // parts))
    tables: list[list[Any]] = [[]]
    room = share
    for row in requests:
        begin, end = int(row["offset"]), int(row["offset"] + row["nbytes"])
        while begin < end:
            cut = end if end - begin <= room else _cut_at(begin, begin + room, end, block_bytes)
            piece = row.copy()
            piece["addr"] += begin - row["offset"]
            piece["offset"], piece["nbytes"] = begin, cut - begin
            tables[-1].append(piece)
            room -= cut - begin
            begin = cut
            if room <= 0:
                tables.append([])
                room = share
    return [np.array(table, requests.dtype) for table in tables if table]


def _cut_at(begin: int, wanted: int, end: int, step: int) -> int:
    """Return the first multiple of `step` from `wanted` on, at most `end`, and after `begin`."""
    return min(end, max(wanted + -wanted % step, begin + 1))
