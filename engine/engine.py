"""What every engine is: the abstract class, with all that engines have in common."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import Any, ClassVar, Self

import torch

from tensorspill.engine.batch import Batch, lower
from tensorspill.engine.file import File
from tensorspill.engine.folder import MODES, Folder
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.options import Resolved
from tensorspill.engine.request import Request
from tensorspill.engine.statistics import EngineStatistics
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.pool.cuda.streams import Event, current_stream

__all__ = ["Engine"]


class Engine(ABC):
    """Moves bytes between memory and the files of one folder.

    Order of calls:

    1. `open` files.
    2. `submit` a batch of requests (or `prepare` it once and submit it often).
    3. wait for the `Transfer` that `submit` returned.
    4. `close`, which waits for what is under way and closes the files.

    Everything may be called from any thread. Batches are started in the order of submission and
    may overtake one another; who needs an order waits for the first transfer.

    A subclass provides `_open`, `_start`, `_release` and `_extra`.
    """

    #: How users name the engine in ``backend=``.
    name: ClassVar[str]

    def __init__(
        self, folder: str | os.PathLike[str], device: torch.device, options: Resolved[Any]
    ) -> None:
        self.device = device
        self.options = options
        self._folder = Folder(folder)
        self._ledger = Ledger(self._folder.path)
        self._files: list[File] = []
        self._open_files = 8
        self._lock = threading.Lock()
        self._released = threading.Lock()

    # -- what a subclass provides ------------------------------------------------------------

    @abstractmethod
    def _open(self, name: str, flags: int, size: int | None) -> File:
        """Open a file in `self._folder`, preallocated to `size` bytes if given."""

    @abstractmethod
    def _start(self, batch: Batch, transfer: Transfer) -> None:
        """Begin a transfer that the ledger has entered; `Ledger.end` must follow in any case.

        CUDA memory may be touched only after `Transfer.ready`.
        """

    @abstractmethod
    def _release(self) -> None:
        """Give back threads and contexts; called once, with no transfer under way."""

    @abstractmethod
    def _extra(self) -> dict[str, Any]:
        """Return the statistics that only this engine knows: at least ``staging_bytes``."""

    # -- what users call -----------------------------------------------------------------------

    @property
    def folder(self) -> str:
        """Absolute path of the folder."""
        return self._folder.path

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._ledger.closed

    def open(self, name: str, mode: str = "r", size: int | None = None) -> File:
        """Open a file in the engine's folder.

        Parameters
        ----------
        name : str
            Relative to the folder; may name a file in an existing subfolder.
        mode : {"r", "r+", "w", "x"}
            Read an existing file; read and write one; create or empty one, then read and write it;
            the same, but it must not exist.
        size : int, optional
            Preallocate the file to at least this many bytes (not with "r").

        Raises
        ------
        MissingFileError, PermissionDeniedError, BrokenError
            The operating system refused.
        NoSpaceError
            There is no room for `size` bytes; a file that this call created is removed again.
        UnsupportedError
            The mode or the name is not allowed.
        ClosedError
            The engine is closed.
        """
        self._ledger.check_open()
        if mode not in MODES:
            raise UnsupportedError(f"Mode {mode!r} is none of {', '.join(MODES)}", path=name)
        if size is not None and (mode == "r" or size < 0):
            raise UnsupportedError("A size needs a mode that writes, and can't be negative")
        file = self._open(name, MODES[mode], size)
        with self._lock:
            # Of those that are closed, some are kept for a while: looking at all takes its time.
            if len(self._files) > 2 * self._open_files:
                self._files = [f for f in self._files if not f.closed]
                self._open_files = len(self._files)
            self._files.append(file)
        return file

    def remove(self, name: str) -> None:
        """Remove a file of the folder; files still open keep their bytes until closed.

        Raises
        ------
        MissingFileError, BrokenError
            The operating system refused.
        """
        self._ledger.check_open()
        try:
            os.unlink(name, dir_fd=self._folder.fd)
        except OSError as error:
            path = os.path.join(self.folder, name)
            raise BrokenError.from_oserror(error, "Can't remove the file", path=path) from error

    def prepare(self, requests: Iterable[Request]) -> Batch:
        """Check and lower requests once, for a batch that is submitted again and again.

        The batch keeps the memory that its buffers have now, even if ``parameter.data`` is later
        pointed elsewhere. Raises what `submit` raises.
        """
        self._ledger.check_open()
        return lower(requests, self.device)

    def submit(self, requests: Iterable[Request] | Batch, *, stream: Any = None) -> Transfer:
        """Start a batch and return its future.

        Parameters
        ----------
        requests : iterable of Request, or Batch
            The transfer keeps buffers and files until it ends. The memory must not be resized
            before that, nor written for writes, nor used at all for reads.
        stream : int, torch.cuda.Stream, cupy.cuda.Stream, numba stream, or with ``__cuda_stream__``
            For CUDA memory: the transfer touches it only after what is on this stream now. Torch's
            current stream if not given, or the legacy default stream where torch has no CUDA.

        Raises
        ------
        ClosedError
            The engine, a file or a buffer is closed, or this is a forked child.
        UnsupportedError
            A request can't be carried out as asked (see `lower`), or the stream is none of the
            engine's device; nothing was started.
        BrokenError
            There is no room for a thread; nothing was started.
        """
        self._ledger.check_open()
        batch = requests if isinstance(requests, Batch) else lower(requests, self.device)
        for file in batch.files:
            if file.ledger is not self._ledger:
                raise UnsupportedError("The file was opened by another engine", path=file.path)
        transfer = Transfer(batch.nbytes)
        if self.device.type == "cuda":
            transfer.ready = self._mark(stream)
        elif stream is not None:
            raise UnsupportedError(f"An engine for {self.device} has no use for a CUDA stream")
        # A transfer that is entered and not started would never end.
        with HeldInterrupts():
            self._ledger.begin(batch, transfer)
            if batch.nbytes == 0:
                self._ledger.end(transfer, None, {})
            else:
                self._start(batch, transfer)
        return transfer

    def _mark(self, stream: Any) -> Event:
        """Return the present end of a stream."""
        index = self.device.index
        event = Event(index)
        event.record(current_stream(index) if stream is None else stream)
        return event

    def note(self, text: str) -> None:
        """Add a line to the notes of `statistics`; the same line is kept once."""
        self._ledger.note(text)

    def serve(self) -> None:
        """Say that another engine uses this one, and counts what it moves."""
        self._ledger.inner = True

    def statistics(self) -> EngineStatistics:
        """Return what the engine has done so far; works after `close` as well."""
        return self._ledger.statistics(
            engine=self.name,
            device=str(self.device),
            options=self.options.described(),
            **self._extra(),
        )

    def close(self) -> None:
        """Wait for all transfers, close all files, stop; a second time does no harm."""
        self._ledger.close()
        self._ledger.wait_idle()
        # Not before the wait: an interrupt there must leave something for the next call.
        if not self._released.acquire(blocking=False):
            return
        self._release()
        for file in self._files:
            file.close()
        self._folder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = " closed" if self.closed else ""
        return f"<{type(self).__name__} {self.folder!r} device={self.device}{state}>"
