"""A part of a batch: the operations that one thread gives to kvikio and waits for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorspill.engine.batch import Batch
from tensorspill.engine.statistics import PathStatistics, TransferRecord
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import SpillError
from tensorspill.gds import paths
from tensorspill.gds.failures import Failure, decode, short
from tensorspill.gds.file import GdsFile
from tensorspill.gds.progress import Progress
from tensorspill.pool.cuda.streams import Event

__all__ = ["Part", "View"]

Table = NDArray[Any]


class View:
    """GPU memory as kvikio takes it; the batch owns it."""

    __slots__ = ("__cuda_array_interface__",)

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }


class Part:
    """Operations of one transfer, and what became of them.

    Every operation is one task of kvikio's, and every one that was begun is waited for: kvikio's
    futures own neither memory nor file, and one of several tasks that fails would leave the others
    running behind its back.

    Parameters
    ----------
    operations : ndarray of `REQUEST`
        From `tensorspill.gds.cutting.cut`.
    path : ndarray of int64
        The `Path` of each.
    batch : Batch
        Kept until the part has ended.
    """

    def __init__(
        self, operations: Table, path: Table, batch: Batch, ready: Event | None, progress: Progress
    ) -> None:
        self.operations = operations
        self.path = path
        self.batch = batch
        self.ready = ready
        self.progress = progress
        self.files: Sequence[GdsFile] = batch.files  # type: ignore[assignment]
        self._begun = np.zeros(len(operations))
        self._ended = np.zeros(len(operations))
        self._done = np.zeros(len(operations), np.bool_)
        #: Operations for the host path, and the first error of the others.
        self._left: list[int] = []
        self._error: BaseException | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the memory may be touched, or waiting for it is of no use."""
        try:
            return self.ready is None or self.ready.query()
        except SpillError:
            return True  # `run` meets it again, and ends the part with it

    def wait_ready(self) -> None:
        """Wait until `is_ready`."""
        try:
            if self.ready is not None:
                self.ready.synchronize()
        except SpillError:
            pass  # as above

    def run(self, depth: int) -> None:
        """Do all operations, at most `depth` at a time; the last thing is to end the part."""
        try:
            if (row := self.beyond_end()) is not None:
                raise self._error_of(row, Failure("", end=True))
            if self.ready is not None:
                self.ready.synchronize()
            self._do(depth)
        except BaseException as error:
            self.fail(error)
        self._finish()

    def beyond_end(self) -> int | None:
        """Return the first read that goes beyond its file's end, or None.

        kvikio raises there or moves fewer bytes, depending on size and mode.
        """
        table = self.operations
        sizes = np.array([file.size for file in self.files], "i8")
        ends = table["offset"] + table["nbytes"]
        beyond = (table["write"] == 0) & (ends > sizes[table["file"]])
        return int(np.argmax(beyond)) if beyond.any() else None

    def _do(self, depth: int) -> None:
        self._pump(range(len(self.operations)), depth)

    def fail(self, error: BaseException) -> None:
        """Note an error; the first one counts, and stops the rest of the transfer."""
        if self._error is None or isinstance(self._error, CancelledError):
            self._error = error
        if not isinstance(error, CancelledError):
            self.progress.stop()

    def _pump(self, rows: Sequence[int], depth: int) -> None:
        """Give operations to kvikio, and wait for all that were."""
        window: deque[tuple[int, Any]] = deque()
        threshold = paths.Path.BELOW_THRESHOLD
        try:
            for row in rows:
                if self.progress.stopped:
                    raise CancelledError("The transfer was cancelled")
                while len(window) >= depth:
                    self._wait(*window.popleft())
                future = self._begin(row)
                if future is None:
                    continue
                if self.path[row] == threshold:  # kvikio has done it already
                    self._wait(row, future)
                else:
                    window.append((row, future))
        finally:
            while window:
                self._wait(*window.popleft())

    def _begin(self, row: int) -> Any:
        """Give one operation to kvikio; None if the host path is to do it, or it failed."""
        address, nbytes, offset, number, write = self.operations[row].item()
        file = self.files[number]
        if file.host is not None or file.handle is None:
            self._left.append(row)
            return None
        cufile = file.handle.file
        self._begun[row] = time.perf_counter()
        try:
            start = cufile.pwrite if write else cufile.pread
            return start(View(address, nbytes), nbytes, offset, nbytes)
        except RuntimeError as error:
            self.failed(row, decode(error))
            return None

    def _wait(self, row: int, future: Any) -> None:
        nbytes = int(self.operations["nbytes"][row])
        try:
            moved = future.get()
        except RuntimeError as error:
            self.failed(row, decode(error))
            return
        if moved == nbytes:
            self.succeeded(row)
        else:
            self.failed(row, short(moved, nbytes, self._ends_early(row)))

    def succeeded(self, row: int) -> None:
        """Account an operation that moved all of its bytes."""
        self._ended[row] = time.perf_counter()
        self._done[row] = True

    def failed(self, row: int, failure: Failure, may_fall_back: bool = True) -> None:
        """Account an operation that failed: the host path tries again if the file may fall back."""
        file = self.files[int(self.operations["file"][row])]
        fell_back = failure.may_fall_back and file.fall_back(failure)
        if fell_back and may_fall_back:
            self._left.append(row)
            return
        self.fail(self._error_of(row, failure))

    def _error_of(self, row: int, failure: Failure) -> SpillError:
        _, nbytes, offset, number, write = self.operations[row].item()
        action, path = "Write" if write else "Read", self.files[number].path
        return failure.error(action, path=path, offset=offset, nbytes=nbytes)

    def _ends_early(self, row: int) -> bool:
        """Whether a read goes beyond the end of the file as it is now."""
        _, nbytes, offset, number, write = self.operations[row].item()
        return not write and offset + nbytes > self.files[number].size

    def _finish(self) -> None:
        """End the part, after the host path has done what is left for it."""
        if not self._left or self._error is not None or self.progress.stopped:
            error = self._error
            if error is None and self._left:
                error = CancelledError("The transfer was cancelled")
            self.progress.part_ended(error, self._sums())
            return
        try:
            transfer = self._hand_over()
        except BaseException as error:
            self.progress.part_ended(error, self._sums())
            return
        self.progress.on_stop(transfer.cancel)
        transfer.add_done_callback(lambda _: self._host_ended(transfer))

    def _sums(self) -> dict[str, PathStatistics]:
        return paths.sums(self.operations, self.path, self._begun, self._ended, self._done)

    def _hand_over(self) -> Transfer:
        """Start what is left on the host path."""
        rows = self.operations[sorted(self._left)].copy()
        used = np.unique(rows["file"])
        hosts = []
        for number in used.tolist():
            host = self.files[number].host
            assert host is not None  # what is left has fallen back
            host.exclusive = self.files[number].exclusive
            hosts.append(host)
        rows["file"] = np.searchsorted(used, rows["file"])
        fallback = self.files[int(used[0])].fallback
        return fallback.submit(Batch(rows, tuple(hosts), self.batch.keep))

    def _host_ended(self, transfer: Transfer) -> None:
        error = transfer.exception(0)
        if error is not None:
            self.progress.part_ended(error, self._sums())
            return
        record = transfer.result(0)
        first = self.files[int(self.operations["file"][self._left[0]])]
        moved = self._sums() | {"host": _host_path(record, len(self._left), first.why_host)}
        self.progress.part_ended(None, moved)


def _host_path(record: TransferRecord, operations: int, why: str) -> PathStatistics:
    return PathStatistics(
        record.nbytes, record.nbytes, operations, record.seconds, record.seconds, why
    )
