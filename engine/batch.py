"""A batch: requests checked and lowered to one table of addresses that an engine can run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.engine.request import Request
from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer

if TYPE_CHECKING:
    from tensorspill.engine.file import File

__all__ = ["REQUEST", "Batch", "lower"]

#: A lowered request: `file` indexes `Batch.files`, `write` is 0 or 1, the rest are bytes.
REQUEST = np.dtype(
    [("addr", "i8"), ("nbytes", "i8"), ("offset", "i8"), ("file", "i4"), ("write", "i4")]
)

#: Beyond the files of any file system, and far enough from 2**63 for rounding.
LARGEST_OFFSET = 1 << 62


class Batch:
    """Requests that were checked once and can be submitted any number of times.

    Attributes
    ----------
    table : ndarray of `REQUEST`
        The requests, in order.
    files : tuple of File
        What the column ``file`` indexes.
    nbytes : int
        Bytes of all requests.
    keep : tuple
        Storages and buffers that own the memory; alive as long as the batch.
    """

    __slots__ = ("files", "keep", "nbytes", "table")

    def __init__(self, table: NDArray[Any], files: tuple[File, ...], keep: tuple[Any, ...]) -> None:
        self.table = table
        self.files = files
        self.keep = keep
        self.nbytes = int(table["nbytes"].sum())

    def __len__(self) -> int:
        return len(self.table)

    @property
    def bytes_written(self) -> int:
        """Bytes that go to files; the rest are read."""
        return int(self.table["nbytes"][self.table["write"] != 0].sum())


def lower(requests: Iterable[Request], device: torch.device) -> Batch:
    """Check requests and lower them to a `Batch`.

    Parameters
    ----------
    requests : iterable of Request
        In the order in which the engine starts them.
    device : torch.device
        Where every buffer must be.

    Raises
    ------
    UnsupportedError
        A buffer is non-contiguous, read-only, too small, on another device, or of a type without
        memory; an offset or size is negative; two requests overlap where at least one writes to
        the shared bytes.
    ClosedError
        A file or buffer was closed.
    """
    files: dict[int, int] = {}
    opened: list[File] = []
    keep: list[Any] = []
    rows: list[tuple[int, int, int, int, int]] = []
    for request in requests:
        address, available, owner = _memory(request, device)
        file = request.file
        index = files.get(id(file))
        if index is None:
            file.check_open()
            index = files[id(file)] = len(opened)
            opened.append(file)
        nbytes = available if request.nbytes is None else request.nbytes
        if not 0 <= nbytes <= available or not 0 <= request.offset <= LARGEST_OFFSET - nbytes:
            raise _bad_range(request, nbytes, available)
        rows.append((address, nbytes, request.offset, index, 1 if request.write else 0))
        keep.append(owner)
    table = np.array(rows, dtype=REQUEST)
    _check_modes(table, opened)
    _check_overlaps(table, opened)
    return Batch(table, tuple(opened), tuple(keep))


def _memory(request: Request, device: torch.device) -> tuple[int, int, Any]:
    """Return (address, bytes, owner of the memory) of a request's buffer."""
    buffer = request.buffer
    if not isinstance(buffer, torch.Tensor):
        if not isinstance(buffer, Buffer):
            return _array_memory(request, device)
        buffer = buffer.tensor
    on_device = buffer.is_cpu if device.type == "cpu" else buffer.device == device
    if not on_device:
        raise _unusable(request, f"The buffer is on {buffer.device}, this engine serves {device}")
    if not buffer.is_contiguous():
        raise _unusable(request, "The buffer is not contiguous")
    # The storage, not the tensor: `parameter.data = other` must not free memory in flight.
    return buffer.data_ptr(), buffer.nbytes, buffer.untyped_storage()


def _array_memory(request: Request, device: torch.device) -> tuple[int, int, Any]:
    """Return the same of an array or any object with the buffer protocol."""
    buffer = request.buffer
    if device.type != "cpu":
        raise _unusable(request, f"The buffer is in host memory, this engine serves {device}")
    try:
        array = buffer if isinstance(buffer, np.ndarray) else np.frombuffer(buffer, "u1")
    except (TypeError, ValueError, BufferError) as error:
        if isinstance(error, ValueError) and memoryview(buffer).nbytes == 0:
            return 0, 0, buffer
        raise _unusable(
            request, f"A {type(buffer).__name__} has no usable memory: {error}"
        ) from error
    if not array.flags.c_contiguous:
        raise _unusable(request, "The buffer is not contiguous")
    if not (array.flags.writeable or request.write):
        raise _unusable(request, "The destination is read-only")
    return array.ctypes.data, array.nbytes, array


def _unusable(request: Request, why: str) -> UnsupportedError:
    return UnsupportedError(
        why, path=request.file.path, offset=request.offset, nbytes=request.nbytes
    )


def _bad_range(request: Request, nbytes: int, available: int) -> UnsupportedError:
    if nbytes > available:
        what = f"The buffer has {available} bytes"
    else:
        what = f"A range is negative or goes beyond {LARGEST_OFFSET}"
    return UnsupportedError(what, path=request.file.path, offset=request.offset, nbytes=nbytes)


def _check_modes(table: NDArray[Any], files: Sequence[File]) -> None:
    for index, file in enumerate(files):
        writes = table["write"][table["file"] == index]
        if not file.writable and bool(writes.any()):
            raise UnsupportedError("The file was opened for reading only", path=file.path)


def _check_overlaps(table: NDArray[Any], files: Sequence[File]) -> None:
    """Refuse two requests that share memory one of them reads into, or file bytes one writes."""
    writes = table["write"] != 0
    pair = _overlap(table["addr"], table["nbytes"], changed=~writes)
    if pair is None:
        for index in range(len(files)):
            rows = np.flatnonzero(table["file"] == index)
            found = _overlap(table["offset"][rows], table["nbytes"][rows], changed=writes[rows])
            pair = None if found is None else (int(rows[found[0]]), int(rows[found[1]]))
            if pair is not None:
                break
    if pair is not None:
        row = table[pair[1]]
        raise UnsupportedError(
            f"Requests {pair[0]} and {pair[1]} of the batch overlap where one of them writes",
            path=files[row["file"]].path,
            offset=int(row["offset"]),
            nbytes=int(row["nbytes"]),
        )


def _overlap(
    starts: NDArray[np.int64], sizes: NDArray[np.int64], changed: NDArray[np.bool_]
) -> tuple[int, int] | None:
    """Return two intervals that share a byte, at least one of them `changed`, or None."""
    if not changed.any():
        return None
    used = np.flatnonzero(sizes > 0)
    order = used[np.argsort(starts[used], kind="stable")]
    begin, end = starts[order], starts[order] + sizes[order]
    if not np.any(begin[1:] < np.maximum.accumulate(end)[:-1]):
        return None
    return _first_conflict(order, begin, end, changed[order])


def _first_conflict(
    order: NDArray[np.int64],
    begin: NDArray[np.int64],
    end: NDArray[np.int64],
    changed: NDArray[np.bool_],
) -> tuple[int, int] | None:
    """Sweep sorted intervals, remembering the furthest end of all and of the changed ones."""
    reach = {False: (-1, -1), True: (-1, -1)}
    for position in range(len(order)):
        flag = bool(changed[position])
        rivals = (reach[True], reach[False]) if flag else (reach[True],)
        for far, other in rivals:
            if begin[position] < far:
                return int(order[other]), int(order[position])
        reach[flag] = max(reach[flag], (int(end[position]), position))
    return None
