"""A batch: requests checked and lowered to one table of addresses that an engine can run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.engine.request import Request
from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.cuda.arrays import is_plain, memory_of
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.pointers import first_unusable

if TYPE_CHECKING:
    from tensorspill.engine.file import File

__all__ = ["REQUEST", "Batch", "lower"]

#: A lowered request: `file` indexes `Batch.files`, `write` is 0 or 1, the rest are bytes.
REQUEST = np.dtype(
    [("addr", "i8"), ("nbytes", "i8"), ("offset", "i8"), ("file", "i4"), ("write", "i4")]
)

#: Types whose fields are what they say; subclasses may compute them.
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})

#: Beyond the files of any file system, and far enough from 2**63 for rounding.
LARGEST_OFFSET = 1 << 62
_LARGEST = (1 << 63) - 1


class Batch:
    """Requests that were checked once and can be submitted any number of times.

    Attributes
    ----------
    table : ndarray of `REQUEST`
        The requests, in order.
    files : tuple of File
        What the column ``file`` indexes.
    nbytes, bytes_written : int
        Bytes of all requests, and of those that go to files; the rest are read.
    keep : tuple
        Storages and buffers that own the memory; alive as long as the batch.
    """

    __slots__ = ("bytes_written", "files", "keep", "nbytes", "table")

    def __init__(self, table: NDArray[Any], files: tuple[File, ...], keep: tuple[Any, ...]) -> None:
        self.table = table
        self.files = files
        self.keep = keep
        self.nbytes = int(table["nbytes"].sum())
        self.bytes_written = int(table["nbytes"] @ (table["write"] != 0))

    def __len__(self) -> int:
        return len(self.table)


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
        A buffer is non-contiguous, read-only, too small, on another device, of a type without
        memory, or CUDA memory that was freed or is managed; an offset or size is negative; two
        requests overlap where at least one writes to the shared bytes.
    ClosedError
        A file or buffer was closed.
    """
    requests = list(requests)
    files, indices = _files(requests)
    addresses, available, owners = _memory_columns(requests, device)
    table = np.empty(len(requests), REQUEST)
    table["addr"], table["file"] = addresses, indices
    _fill_ranges(table, requests, np.array(available, "i8"))
    table["write"] = [bool(request.write) for request in requests]
    _check_modes(table, files)
    if len(table) > 1:
        _check_overlaps(table, files)
    return Batch(table, files, tuple(owners))


def _files(requests: list[Request]) -> tuple[tuple[File, ...], list[int]]:
    """Return the distinct files of requests, all open, and the index of each request's file."""
    files = {id(request.file): request.file for request in requests}
    for file in files.values():
        file.check_open()
    numbers = {key: index for index, key in enumerate(files)}
    return tuple(files.values()), [numbers[id(request.file)] for request in requests]


def _memory_columns(
    requests: list[Request], device: torch.device
) -> tuple[list[int], list[int], list[Any]]:
    """Return addresses, bytes and owners of the requests' buffers.

    Column by column for plain tensors: of thousands of small ones, each look at a field counts.
    """
    tensors = [request.buffer for request in requests]
    host = device.type == "cpu"
    with nullcontext() if host else current(device.index):
        if _PLAIN.issuperset(map(type, tensors)) and _all_plain(tensors, device):
            addresses = [t.data_ptr() for t in tensors]
            available = [t.nbytes for t in tensors]
            # Storages, not tensors: `parameter.data = other` must not free memory in flight.
            owners: list[Any] = [t.untyped_storage() for t in tensors]
        else:
            rows = [_memory(request, device) for request in requests]
            addresses, available, owners = (list(column) for column in zip(*rows, strict=True))
        if not host:
            _check_allocations(requests, addresses, available, device.index)
    return addresses, available, owners


def _all_plain(tensors: list[Any], device: torch.device) -> bool:
    if device.type == "cpu":
        return all(t.is_cpu and is_plain(t) for t in tensors)
    index = device.index
    return all(t.is_cuda and t.get_device() == index and is_plain(t) for t in tensors)


def _check_allocations(
    requests: list[Request], addresses: list[int], sizes: list[int], device: int
) -> None:
    """Refuse what the driver does not know as memory of this GPU."""
    # A storage that was resized to nothing leaves its tensors without an address.
    held = [size if address else 0 for address, size in zip(addresses, sizes, strict=True)]
    found = first_unusable(addresses, held, device)
    if found is not None:
        raise _unusable(requests[found[0]], found[1])


def _fill_ranges(
    table: NDArray[Any], requests: list[Request], available: NDArray[np.int64]
) -> None:
    """Fill in offsets and sizes, which must lie inside the buffers and in a file's reach."""
    largest = _LARGEST
    sizes = [largest if request.nbytes is None else request.nbytes for request in requests]
    offsets = [request.offset for request in requests]
    try:
        table["nbytes"], table["offset"] = sizes, offsets
    except OverflowError:
        table["nbytes"] = [min(max(size, -1), largest - 1) for size in sizes]
        table["offset"] = [min(max(offset, -1), largest) for offset in offsets]
    # A storage that was resized to nothing leaves its tensors without an address.
    available[table["addr"] == 0] = 0
    nbytes, offset = table["nbytes"], table["offset"]
    np.copyto(nbytes, available, where=nbytes == largest)
    bad = (nbytes < 0) | (nbytes > available) | (offset < 0) | (offset > LARGEST_OFFSET - nbytes)
    if bad.any():
        first = int(np.argmax(bad))
        raise _bad_range(requests[first], int(nbytes[first]), int(available[first]))


def _memory(request: Request, device: torch.device) -> tuple[int, int, Any]:
    """Return (address, bytes, owner of the memory) of a request's buffer."""
    buffer = request.buffer
    if isinstance(buffer, Buffer):
        if buffer.device != device:
            raise _elsewhere(request, buffer.device, device)
        return buffer.address, buffer.nbytes, buffer.memory
    if not isinstance(buffer, torch.Tensor):
        memory = _cuda_memory if device.type == "cuda" else _array_memory
        return memory(request, device)
    on_device = buffer.is_cpu if device.type == "cpu" else buffer.device == device
    if not on_device:
        raise _elsewhere(request, buffer.device, device)
    if not is_plain(buffer):
        raise _unusable(request, "The buffer is not contiguous, or its bytes are not its values")
    return buffer.data_ptr(), buffer.nbytes, buffer.untyped_storage()


def _cuda_memory(request: Request, device: torch.device) -> tuple[int, int, Any]:
    """Return the same of an array of any CUDA library; the device's context is current."""
    try:
        found = memory_of(request.buffer)
    except UnsupportedError as error:
        raise _unusable(request, error.message) from error
    if found.nbytes and found.device != device:
        raise _elsewhere(request, found.device, device)
    if found.read_only and not request.write:
        raise _unusable(request, "The destination is read-only")
    return found.address, found.nbytes, found.owner


def _array_memory(request: Request, _: torch.device) -> tuple[int, int, Any]:
    """Return the same of an array or any object with the buffer protocol."""
    buffer = request.buffer
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


def _elsewhere(request: Request, where: torch.device, device: torch.device) -> UnsupportedError:
    return _unusable(request, f"The buffer is on {where}, this engine serves {device}")


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
    fixed = [index for index, file in enumerate(files) if not file.writable]
    if not fixed or not table["write"].any():
        return
    for index in fixed:
        if table["write"][table["file"] == index].any():
            raise UnsupportedError("The file was opened for reading only", path=files[index].path)


def _check_overlaps(table: NDArray[Any], files: Sequence[File]) -> None:
    """Refuse two requests that share memory one of them reads into, or file bytes one writes."""
    writes = table["write"] != 0
    pair = _overlap(table["addr"], table["nbytes"], changed=~writes)
    if pair is None and writes.any() and (len(files) == 1 or _may_overlap(table)):
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


def _may_overlap(table: NDArray[Any]) -> bool:
    """Whether any two requests share bytes of a file, written or not: one look at all files."""
    used = table[table["nbytes"] > 0]
    order = np.lexsort((used["offset"], used["file"]))
    file, begin, nbytes = (used[name][order] for name in ("file", "offset", "nbytes"))
    return bool(np.any((file[1:] == file[:-1]) & (begin[1:] < begin[:-1] + nbytes[:-1])))


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
