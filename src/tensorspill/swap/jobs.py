"""Reads and writes of a swapper under way: what they change at the start, at the end, or not."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.swap.buffers import SwapBuffers
from tensorspill.swap.entries import Entries, Entry, check_status, check_stored
from tensorspill.swap.status import SwapStatus

__all__ = ["Reading", "Writing"]

log = logging.getLogger(__name__)

AVAILABLE, NOT_AVAILABLE = SwapStatus.AVAILABLE, SwapStatus.NOT_AVAILABLE
Memory = Buffer | torch.Tensor


class _Job:
    """A batch under way; a `Watcher` of the spill file's transfer.

    `begin` marks the batch INFLIGHT, all of it or none. Then comes either `ended`, from the spill
    file, or `withdraw`, if the transfer could not be started.

    Attributes
    ----------
    tensors : dict of str to torch.Tensor
        What the spill file is to move.
    """

    def __init__(self, entries: Entries, buffers: SwapBuffers) -> None:
        self.started = False
        self.tensors: dict[str, torch.Tensor] = {}
        self._entries = entries
        self._buffers = buffers
        self._batch: list[tuple[Entry, SwapStatus]] = []

    def withdraw(self) -> None:
        """Undo `begin`, unless the transfer was started, whose end will do it."""
        if not self.started:
            self._undo()
            self._forget()

    def ended(self, error: BaseException | None) -> None:
        """Settle everything; called by the spill file."""
        try:
            if error is None:
                self._done()
            else:
                self._undo()
                with self._entries.lock:
                    self._entries.counts["failures"] += len(self._batch)
        except BaseException:  # pragma: no cover
            log.exception("A swapper could not settle a batch")
            raise
        finally:
            self._forget()

    def _forget(self) -> None:
        """Let go of the memory: whoever holds the transfer holds this object."""
        self.tensors, self._batch = {}, []

    def _mark(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            self._batch.append((entry, entry.status))
            entry.status = SwapStatus.INFLIGHT

    def _count(self, direction: str) -> None:
        counts = self._entries.counts
        counts[f"swapped_{direction}"] += len(self._batch)
        counts[f"bytes_{direction}"] += sum(tensor.nbytes for tensor in self.tensors.values())

    def _done(self) -> None:
        raise NotImplementedError

    def _undo(self) -> None:
        raise NotImplementedError


class Writing(_Job):
    """Parameters on their way to the drive.

    Parameters
    ----------
    release : bool or None
        Whether they are NOT_AVAILABLE afterwards; None leaves that as it was.
    """

    def __init__(self, entries: Entries, buffers: SwapBuffers, release: bool | None) -> None:
        super().__init__(entries, buffers)
        self._release = release

    def begin(self, batch: Sequence[Entry]) -> None:
        """Mark a batch INFLIGHT; what will be released is a placeholder from now on.

        Called with the lock of the entries. Raises what `check_status` does, and UnsupportedError
        for data that isn't what the parameter's value has to be.
        """
        check_status(batch, AVAILABLE, NOT_AVAILABLE)
        check_status([entry for entry in batch if entry.taken is None], AVAILABLE)
        tensors = {}
        for entry in batch:
            data = entry.view(entry.taken) if entry.taken is not None else entry.data
            if data.dtype is not entry.dtype or data.numel() != entry.numel:
                raise _changed(entry, data)
            tensors[entry.name] = data
        self._entries.keep(batch)
        self._mark(batch)
        self.tensors = tensors
        for entry, before in self._batch:
            if entry.taken is None and self._leaves(before):
                entry.data = entry.placeholder()

    def _leaves(self, before: SwapStatus) -> bool:
        return before is NOT_AVAILABLE if self._release is None else self._release

    def _done(self) -> None:
        free: list[Buffer] = []
        with self._entries.lock:
            for entry, before in self._batch:
                entry.stored = True
                if self._leaves(before):
                    free += [memory for memory in (entry.home, entry.taken) if memory is not None]
                    if entry.taken is not None:
                        entry.data = entry.placeholder()
                    entry.home = entry.taken = None
                    entry.status = NOT_AVAILABLE
                else:
                    if entry.taken is not None:
                        if entry.home is not None:
                            free.append(entry.home)
                        entry.home, entry.taken = entry.taken, None
                        entry.data = self.tensors[entry.name]
                    entry.status = AVAILABLE
            self._count("out")
        self._buffers.give_back(reversed(free))

    def _undo(self) -> None:
        with self._entries.lock:
            for entry, before in self._batch:
                if entry.taken is None and self._leaves(before):
                    entry.data = self.tensors[entry.name]
                entry.status = before


class Reading(_Job):
    """Parameters on their way into memory."""

    def __init__(self, entries: Entries, buffers: SwapBuffers) -> None:
        super().__init__(entries, buffers)
        self._fresh: list[Buffer] = []
        self._homes: list[Buffer | None] = []

    def begin(self, batch: Sequence[Entry]) -> None:
        """Mark a batch INFLIGHT.

        Called with the lock of the entries.

        Raises
        ------
        UnsupportedError, BusyError, MissingNameError
            A parameter can't be read; nothing changed.
        """
        check_status(batch, NOT_AVAILABLE)
        check_stored(batch)
        self._mark(batch)

    def provide(self, given: Sequence[Memory] | None) -> None:
        """Find memory for each parameter: given, taken before, or fresh.

        Raises
        ------
        CapacityError
            There is no memory for all.
        UnsupportedError
            Given memory does not fit.
        """
        batch = [entry for entry, _ in self._batch]
        if given is not None:
            if len(given) != len(batch):
                raise UnsupportedError(f"{len(batch)} parameters, {len(given)} buffers")
            self._homes = [None] * len(batch)
            views = [_fit(entry, memory) for entry, memory in zip(batch, given, strict=True)]
        else:
            self._fresh = self._buffers.take([entry for entry in batch if entry.taken is None])
            fresh = iter(self._fresh)
            homes = [next(fresh) if entry.taken is None else entry.taken for entry in batch]
            views = [entry.view(home) for entry, home in zip(batch, homes, strict=True)]
            self._homes = [*homes]
        self.tensors = {entry.name: view for entry, view in zip(batch, views, strict=True)}

    def _done(self) -> None:
        with self._entries.lock:
            for (entry, _), home in zip(self._batch, self._homes, strict=True):
                entry.data = self.tensors[entry.name]
                if home is not None:
                    entry.home, entry.taken = home, None
                entry.status = AVAILABLE
            self._count("in")

    def _undo(self) -> None:
        with self._entries.lock:
            for entry, before in self._batch:
                entry.status = before
        fresh, self._fresh = self._fresh, []
        self._buffers.give_back(reversed(fresh))


def _fit(entry: Entry, memory: Memory) -> torch.Tensor:
    """Return given memory in the shape of a parameter."""
    tensor = memory.tensor if isinstance(memory, Buffer) else memory
    if not isinstance(tensor, torch.Tensor):
        raise UnsupportedError(f"A {type(memory).__name__} is no tensor and no buffer")
    if tensor.dtype is not entry.dtype or tensor.numel() < entry.numel:
        raise UnsupportedError(
            f"Memory of {tensor.numel()} elements of {tensor.dtype} for a parameter of "
            f"{entry.numel} elements of {entry.dtype}"
        )
    if not tensor.is_contiguous():
        raise UnsupportedError("The memory for a parameter is not contiguous")
    return entry.view(tensor)


def _changed(entry: Entry, data: torch.Tensor) -> UnsupportedError:
    remedy = "Use cast_and_write" if data.dtype is not entry.dtype else None
    return UnsupportedError(
        f"The data has {data.numel()} elements of {data.dtype}, the stored parameter "
        f"{entry.numel} of {entry.dtype}",
        remedy=remedy,
    )
