"""Snapshots: copies of tensors, in memory that is taken once and bounded."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from tensorspill.errors import BusyError, ClosedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.sizes import parse_bytes, round_up

__all__ = ["Snapshot", "Staging", "shared_staging"]

_PAGE, _LINE = 4096, 64


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where copies of tensors like the last ones go."""

    kinds: list[tuple[torch.dtype, torch.Size]]
    copies: list[torch.Tensor | None]
    nbytes: int


class Staging:
    """Memory for snapshots of state; on the host it is page-locked where a CUDA driver is there.

    The memory is taken when it is first needed, as much as is needed up to the budget, and kept
    for the next snapshot: the first one takes longer, since the kernel has to provide the pages.

    Parameters
    ----------
    budget : int or str, optional
        Bytes at most; half of the memory that is available at the first snapshot if not given.
    device : str or torch.device
        Where the memory is. In a GPU's own memory the copies are made fastest.
    """

    def __init__(self, budget: int | str | None = None, device: str | torch.device = "cpu") -> None:
        self.device = torch.device(device)
        self.budget = None if budget is None else parse_bytes(budget)
        self._pool: BufferPool | None = None
        self._buffer: Buffer | None = None
        self._layout: _Layout | None = None
        self._changed = threading.Condition()
        self._taken = False
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of memory held now."""
        return self._pool.capacity if self._pool is not None else 0

    def snapshot(self, tensors: Sequence[torch.Tensor], *, wait: float | None = None) -> Snapshot:
        """Copy tensors, in their order, as long as there is room for all of a tensor.

        Returns when the copies are complete, those from GPUs included.

        Parameters
        ----------
        tensors : sequence of torch.Tensor
            Any strides, any device.
        wait : float, optional
            Seconds to wait at most until the last snapshot is released; without a limit if not
            given.

        Raises
        ------
        BusyError
            The last snapshot was not released in time.
        ClosedError
            `close` was called.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._closed or not self._taken, wait):
                raise BusyError("The last snapshot is still being written")
            if self._closed:
                raise ClosedError("The staging memory was closed")
            self._taken = True
        try:
            copies = self._copies(tensors)
            pairs = [(c, t) for c, t in zip(copies, tensors, strict=True) if c is not None]
            _copy(pairs)
            return Snapshot(self, copies)
        except BaseException:
            self._release()
            raise

    def _copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if self._layout is None or self._layout.kinds != kinds:
            self._layout = None
            self._layout = self._lay_out(kinds)
        return self._layout.copies

    def _lay_out(self, kinds: list[tuple[torch.dtype, torch.Size]]) -> _Layout:
        sizes = [dtype.itemsize * shape.numel() for dtype, shape in kinds]
        memory = self._memory(sum(map(_room, sizes)))
        copies: list[torch.Tensor | None] = []
        at = 0
        for (dtype, shape), nbytes in zip(kinds, sizes, strict=True):
            at = round_up(at, _PAGE if nbytes >= _PAGE else _LINE)
            if at + nbytes > len(memory):
                copies.append(None)
                continue
            copies.append(memory[at : at + nbytes].view(dtype).view(shape))
            at += nbytes
        return _Layout(kinds, copies, at)

    def _memory(self, needed: int) -> torch.Tensor:
        budget = _available(self.device) // 2 if self.budget is None else self.budget
        wanted = min(needed, budget)
        if self._pool is None or not wanted <= self._pool.capacity <= round_up(budget, _PAGE):
            self._give_up()
            self._pool = BufferPool(wanted, self.device)
            self._buffer = self._pool.allocate(self._pool.capacity)
        if self._buffer is None:
            raise ClosedError("The staging memory was closed")
        # Rounding up to pages is not part of the budget.
        return self._buffer.tensor[: max(min(self._buffer.nbytes, budget), 0)]

    def _release(self) -> None:
        with self._changed:
            self._taken = False
            self._changed.notify_all()
            if self._closed:
                self._give_up()

    def _give_up(self) -> None:
        self._layout = None
        if self._buffer is not None:
            self._buffer.release()
        if self._pool is not None:
            self._pool.close()
        self._buffer = self._pool = None

    def close(self) -> None:
        """Give up the memory, once the last snapshot is released; a second time does no harm."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            if not self._taken:
                self._give_up()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Snapshot:
    """Copies of some tensors, as they were; one that is dropped is released.

    Attributes
    ----------
    copies : list of torch.Tensor or None
        None where there was no room.
    nbytes : int
        Of all copies.
    """

    def __init__(self, staging: Staging, copies: list[torch.Tensor | None]) -> None:
        self.copies = copies
        self.nbytes = sum(copy.nbytes for copy in copies if copy is not None)
        self._return = weakref.finalize(self, staging._release)
        self._return.atexit = False

    def release(self) -> None:
        """Give the memory back for the next snapshot; a second time does no harm."""
        self.copies = []
        self._return()


def _room(nbytes: int) -> int:
    return round_up(nbytes, _PAGE if nbytes >= _PAGE else _LINE) + _LINE * (nbytes < _PAGE)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy tensors to where they are kept; returns when that is done."""
    streams: set[torch.cuda.Stream] = set()
    with torch.no_grad():
        for copy, tensor in pairs:
            copy.copy_(tensor, non_blocking=True)
            streams.update(torch.cuda.current_stream(t.device) for t in (copy, tensor) if t.is_cuda)
    for stream in streams:
        stream.synchronize()


def _available(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 1 << 30


_shared: dict[int, Staging] = {}


def shared_staging(budget: int | str | None) -> Staging:
    """Return the process's own staging memory, whose budget becomes the one given."""
    # A forked child has no part in what its parent copies.
    staging = _shared.setdefault(os.getpid(), Staging())
    staging.budget = None if budget is None else parse_bytes(budget)
    return staging
