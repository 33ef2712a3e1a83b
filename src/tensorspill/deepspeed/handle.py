"""The handle by which DeepSpeed moves tensors to and from files, on this library's engines."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, ClassVar

import torch

from tensorspill.deepspeed.batching import Batching, Group
from tensorspill.deepspeed.files import Files, path_of
from tensorspill.deepspeed.pinned import pinned_tensors
from tensorspill.engine import Request
from tensorspill.errors import CorruptError, UnsupportedError
from tensorspill.pool.cuda.arrays import is_plain
from tensorspill.pool.sizes import round_up

__all__ = ["AioHandle", "GdsHandle"]

#: More of them under way bring nothing, and each has a staging block.
DEEPEST = 64
PAGE = 4096


class AioHandle:
    """DeepSpeed's ``aio_handle``.

    What differs from DeepSpeed's own: whatever was not moved completely raises, with path and
    errno, from the call or from `wait`; `wait` with nothing to wait for returns 0; sizes need not
    be multiples of anything; memory need not be pinned. Small operations may begin together, when
    those before them have ended, see `Batching`.

    Parameters
    ----------
    block_size : int
        Bytes of one I/O operation; rounded up to 4096.
    queue_depth : int
        Operations under way at a time; no more than 64 are used.
    single_submit, overlap_events : bool
        Kept and returned; the engine always submits many at a time and overlaps.
    intra_op_parallelism : int
        Threads.

    Raises
    ------
    UnsupportedError
        A number is out of range.
    """

    #: What `pin_device_tensor` and the others serve; host memory alone here.
    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def __init__(
        self,
        block_size: int = 1 << 20,
        queue_depth: int = 128,
        single_submit: bool = False,
        overlap_events: bool = False,
        intra_op_parallelism: int = 1,
    ) -> None:
        if block_size < 1 or queue_depth < 1 or intra_op_parallelism < 1:
            raise UnsupportedError("Block size, queue depth and parallelism are at least 1")
        self._asked = (block_size, queue_depth, single_submit, overlap_events, intra_op_parallelism)
        self._batching = Batching()
        self._files = Files(
            self._batching.let_go,
            block_bytes=round_up(block_size, PAGE),
            depth=min(queue_depth, DEEPEST),
            threads=intra_op_parallelism,
        )
        self._pending: list[_Operation] = []
        self._lock = threading.Lock()
        self._end = weakref.finalize(self, _close, self._batching, self._files)

    # -- what it was made with -------------------------------------------------------------------

    def get_block_size(self) -> int:
        """Return the block size asked for, in bytes."""
        return self._asked[0]

    def get_queue_depth(self) -> int:
        """Return the queue depth asked for."""
        return self._asked[1]

    def get_single_submit(self) -> bool:
        """Return what was asked for."""
        return self._asked[2]

    def get_overlap_events(self) -> bool:
        """Return what was asked for."""
        return self._asked[3]

    def get_intra_op_parallelism(self) -> int:
        """Return the number of threads."""
        return self._asked[4]

    def get_alignment(self) -> int:
        """Return what DeepSpeed rounds sizes up to, in bytes; the engine needs no rounding."""
        return 512 * self._asked[4]

    # -- reading and writing ---------------------------------------------------------------------

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Begin to read as many bytes as the buffer has; return 0.

        Raises
        ------
        MissingFileError, EndOfFileError, BrokenError
            The file can't be opened, or is too short.
        UnsupportedError
            The buffer or the offset can't be used.
        """
        self._begin(buffer, filename, file_offset, write=False, validate=False)
        return 0

    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        """Begin to write a buffer to a file, made if missing, or to an open descriptor; return 0.

        Raises
        ------
        NoSpaceError, BrokenError
            The file can't be made, opened or grown.
        UnsupportedError
            The buffer, the offset or the descriptor can't be used.
        """
        target = filename if fd is None else fd
        if target is None:
            raise UnsupportedError("A write needs a file name or a descriptor")
        path = path_of(target) if isinstance(target, int) else target
        self._begin(buffer, path, file_offset, write=True, validate=False)
        return 0

    def sync_pread(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Read, and return how many operations completed, those begun before included."""
        return self.pread(buffer, filename, False, False, file_offset)

    def sync_pwrite(self, buffer: torch.Tensor, filename: str, file_offset: int = 0) -> int:
        """Write, and return how many operations completed, those begun before included."""
        return self.pwrite(buffer, filename, False, False, file_offset)

    def pread(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool,
        async_: bool = False,
        file_offset: int = 0,
        **others: bool,
    ) -> int:
        """Read; return 0 if ``async``, else how many operations completed.

        With `validate` the bytes are compared with what the page cache says of the file.
        """
        self._begin(buffer, filename, file_offset, write=False, validate=validate)
        return 0 if _is_async(async_, others) else self.wait()

    def pwrite(
        self,
        buffer: torch.Tensor,
        filename: str,
        validate: bool,
        async_: bool = False,
        file_offset: int = 0,
        **others: bool,
    ) -> int:
        """Write; return 0 if ``async``, else how many operations completed."""
        self._begin(buffer, filename, file_offset, write=True, validate=validate)
        return 0 if _is_async(async_, others) else self.wait()

    def read(
        self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Read and wait for this operation alone; return 0."""
        operation = self._operation(buffer, filename, file_offset, write=False, validate=validate)
        self._batching.flush()
        operation.wait()
        return 0

    def write(
        self, buffer: torch.Tensor, filename: str, validate: bool = False, file_offset: int = 0
    ) -> int:
        """Write and wait for this operation alone; return 0."""
        operation = self._operation(buffer, filename, file_offset, write=True, validate=validate)
        self._batching.flush()
        operation.wait()
        return 0

    def wait(self) -> int:
        """Wait for all operations begun; return their number.

        Raises
        ------
        SpillError
            The first thing that went wrong; all operations have ended, and none is counted later.
        """
        with self._lock:
            pending, self._pending = self._pending, []
        self._batching.flush()
        errors = [error for operation in pending if (error := operation.outcome()) is not None]
        if errors:
            raise errors[0]
        return len(pending)

    # -- memory ----------------------------------------------------------------------------------

    def new_cpu_locked_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, **others: torch.Tensor
    ) -> torch.Tensor:
        """Return a new page-aligned tensor of zeros, of the example's dtype."""
        example = example_tensor if example_tensor is not None else others.get("example_tenosr")
        if example is None:
            raise UnsupportedError("A tensor needs an example of its dtype")
        return pinned_tensors.allocate(num_elem, example.dtype)

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Let go of such a tensor; False if it is none."""
        return pinned_tensors.free(tensor.data_ptr())

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is page-locked, or allocated by `new_cpu_locked_tensor`."""
        return pinned_tensors.knows(buffer) or bool(buffer.is_pinned())

    # -- how it is done --------------------------------------------------------------------------

    def _begin(self, buffer: torch.Tensor, path: str, offset: int, **how: bool) -> None:
        operation = self._operation(buffer, path, offset, **how)
        with self._lock:
            self._pending.append(operation)

    def _operation(
        self, buffer: torch.Tensor, path: str, offset: int, *, write: bool, validate: bool
    ) -> _Operation:
        if buffer.device.type not in self.devices:
            raise UnsupportedError(f"A {type(self).__name__} can't serve {buffer.device}")
        path = os.path.abspath(path)
        memory = buffer.detach().contiguous()
        nbytes = memory.nbytes
        if offset < 0 or not is_plain(memory):
            # Later it would be raised by `wait`, as the fault of an operation that was begun.
            raise UnsupportedError(
                "The offset is negative, or the buffer's bytes are not its values",
                path=path,
                offset=offset,
                nbytes=nbytes,
            )
        if write:
            engine, file = self._files.writable(path, memory.device, offset + nbytes)
        else:
            engine, file = self._files.readable(path, memory.device)
        begun = self._batching.add(engine, Request(memory, file, offset, write=write))
        copied = None if write or memory.data_ptr() == buffer.data_ptr() else buffer
        return _Operation(*begun, memory, copied, path, offset, validate)


class GdsHandle(AioHandle):
    """DeepSpeed's ``gds_handle``: GPU memory, by GPUDirect Storage where the node has it.

    Device memory need not be pinned: the engine registers what it is given.
    """

    def new_pinned_device_tensor(
        self, num_elem: int, example_tensor: torch.Tensor | None = None, **others: torch.Tensor
    ) -> torch.Tensor:
        """Return a new tensor on the current GPU, of the example's dtype."""
        example = example_tensor if example_tensor is not None else others.get("example_tenosr")
        if example is None:
            raise UnsupportedError("A tensor needs an example of its dtype")
        return torch.empty(num_elem, dtype=example.dtype, device="cuda")

    def free_pinned_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Do nothing: the tensor's memory is let go with its last user."""
        return tensor.is_cuda

    def pin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a GPU; the engine registers it when it is used."""
        return tensor.is_cuda

    def unpin_device_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is on a GPU."""
        return tensor.is_cuda

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is on a GPU or page-locked."""
        return buffer.is_cuda or super().is_pinned(buffer)


class _Operation:
    """One read or write that was begun, and what is left to do when it has ended."""

    def __init__(
        self,
        group: Group,
        number: int,
        memory: torch.Tensor,
        scatter_to: torch.Tensor | None,
        path: str,
        offset: int,
        validate: bool,
    ) -> None:
        self._group = group
        self._number = number
        self._memory = memory
        self._scatter_to = scatter_to
        self._path = path
        self._offset = offset
        self._validate = validate

    def wait(self) -> None:
        """Wait for the end, and raise what went wrong."""
        self._group.result(self._number)
        if self._scatter_to is not None:
            self._scatter_to.copy_(self._memory)
        if self._validate:
            self._compare()

    def outcome(self) -> Exception | None:
        """Wait for the end, and return what went wrong."""
        try:
            self.wait()
        except Exception as error:
            return error
        return None

    def _compare(self) -> None:
        raw = self._memory.cpu().reshape(-1).view(torch.uint8).numpy()
        with open(self._path, "rb") as file:
            file.seek(self._offset)
            same = file.read(raw.nbytes) == raw.tobytes()
        if not same:
            raise CorruptError(
                "The file differs from what was moved",
                path=self._path,
                offset=self._offset,
                nbytes=raw.nbytes,
            )


def _close(batching: Batching, files: Files) -> None:
    """Wait for what was begun, and close the files."""
    batching.finish()
    files.close()


def _is_async(positional: bool, others: dict[str, Any]) -> bool:
    """Return the argument that DeepSpeed calls ``async``, which is a keyword in Python."""
    unknown = sorted(set(others) - {"async"})
    if unknown:
        raise TypeError(f"unexpected argument {unknown[0]!r}")
    return bool(others.get("async", positional))
