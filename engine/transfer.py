"""A transfer: the future of a batch."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any

from tensorspill.engine.statistics import TransferRecord
from tensorspill.errors import ClosedError
from tensorspill.pool.cuda.streams import Event, handle_of, wait_for

__all__ = ["Transfer", "gather"]


class Transfer(Future[TransferRecord]):
    """The future of a batch of requests.

    It owns the batch's memory and files until it ends, and ends in one of three ways: with a
    `TransferRecord`, with the error that stopped it, or cancelled. The first error of a batch ends
    it: blocks that were not started are dropped, those under way are awaited first.

    Waiting happens on the future, never in a system call, so Ctrl-C is taken at once; it cancels
    the transfer.

    Attributes
    ----------
    nbytes : int
        Bytes asked for.
    ready : Event or None
        For CUDA memory: what the engine waits for before it touches the memory. None once the
        transfer has ended.
    """

    def __init__(self, nbytes: int, stop: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.nbytes = nbytes
        self.ready: Event | None = None
        self._after: Event | None = None
        self._stop = stop
        self._pid = os.getpid()
        self._outcome: TransferRecord | BaseException | None = None
        # Held until the end. Waiting on a plain lock can be interrupted anywhere; an exception from
        # a signal handler in the middle of Future.result can leave the future locked for ever.
        self._gate = threading.Lock()
        self._gate.acquire()
        self.set_running_or_notify_cancel()

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """Say how to stop the transfer; called once, by the engine that runs it."""
        self._stop = stop

    def ends_after(self, event: Event) -> None:
        """Say which event of a stream comes last, for `wait_on`; called by engines that have one.

        All of the transfer is on the GPU's streams then, and `end` follows once they are done.
        """
        self._after = event

    def wait_on(self, stream: Any) -> None:
        """Let what is put on a CUDA stream from now on begin after the transfer has ended.

        Where the whole transfer is on the GPU's streams, this returns at once, and only `result`
        tells whether it went well. Else it waits here, as `result` does.

        Parameters
        ----------
        stream : int, torch.cuda.Stream, cupy.cuda.Stream, numba stream, or with ``__cuda_stream__``

        Raises
        ------
        UnsupportedError
            It is no stream.
        SpillError, concurrent.futures.CancelledError, ClosedError
            What `result` raises, if this had to wait.
        """
        handle, after = handle_of(stream), self._after
        if after is None or self.done():
            self.result()
        else:
            wait_for(handle, after)

    def cancel(self) -> bool:
        """Drop what has not started; what has started is awaited by the engine.

        Returns
        -------
        bool
            False if the transfer had ended already. If True, it ends soon: cancelled, unless all
            of it had been started.
        """
        stop = self._stop
        if self.done():
            return False
        if stop is not None:
            stop()
        return True

    def done(self) -> bool:
        """Whether the transfer has ended."""
        return self._outcome is not None

    def cancelled(self) -> bool:
        """Whether the transfer ended because it was cancelled."""
        return isinstance(self._outcome, CancelledError)

    def result(self, timeout: float | None = None) -> TransferRecord:
        """Wait for the end, at most `timeout` seconds, and return the record.

        Raises
        ------
        SpillError
            What went wrong, with path, offset, bytes and errno.
        concurrent.futures.CancelledError
            The transfer was cancelled.
        TimeoutError
            It has not ended yet; it goes on.
        ClosedError
            This is a forked child, where the transfer can't end.
        """
        outcome = self._wait(timeout)
        if isinstance(outcome, BaseException):
            try:
                raise outcome
            finally:
                # The traceback refers to this frame, which must not refer to the error in turn.
                del outcome, self
        return outcome

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does and return the error, or None."""
        outcome = self._wait(timeout)
        return outcome if isinstance(outcome, BaseException) else None

    def _wait(self, timeout: float | None) -> TransferRecord | BaseException:
        self._check_process()
        try:
            if self._outcome is None:
                self._pass_gate(timeout)
        except KeyboardInterrupt:
            self.cancel()
            raise
        if self._outcome is None:
            raise TimeoutError(f"The transfer has not ended within {timeout} s; it goes on")
        return self._outcome

    def _pass_gate(self, timeout: float | None) -> None:
        if timeout is None:
            with self._gate:
                return
        # What a lock takes is limited, and negative numbers mean something else to it.
        if self._gate.acquire(timeout=min(max(timeout, 0), threading.TIMEOUT_MAX)):
            self._gate.release()

    def _check_process(self) -> None:
        if os.getpid() != self._pid and not self.done():
            raise ClosedError("This transfer belongs to the parent process")

    def end(self, outcome: TransferRecord | BaseException) -> None:
        """End the transfer: called once, by the engine that runs it."""
        self._outcome = outcome
        # What it stops owns the batch, and the batch's memory.
        self._stop = None
        self.ready = None
        self._gate.release()
        if isinstance(outcome, BaseException):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


def gather(
    parts: Sequence[Transfer],
    finish: Callable[[BaseException | None], BaseException | None] | None = None,
    run: Callable[[Callable[[], None]], Any] | None = None,
) -> Transfer:
    """Return one transfer that ends when all of `parts` have; the first error cancels the rest.

    Parameters
    ----------
    parts : sequence of Transfer
        Not used by anyone else any more.
    finish : callable, optional
        Called once, before the returned transfer ends, with the first error or None; returns the
        error to end with. It may not block if `run` is not given.
    run : callable, optional
        Runs `finish` elsewhere, such as an executor's ``submit``; else the thread of the engine
        that ends last does.
    """
    return _Gathering(parts, finish, run).whole


class _Gathering:
    """Waits for several transfers on behalf of one; the first error stops the others."""

    def __init__(
        self,
        parts: Sequence[Transfer],
        finish: Callable[[BaseException | None], BaseException | None] | None,
        run: Callable[[Callable[[], None]], Any] | None,
    ) -> None:
        self._parts = list(parts)
        self._finish = finish
        self._run = run
        self._pending = len(parts)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self.whole = Transfer(sum(part.nbytes for part in parts), self._stop)
        for part in parts:
            part.add_done_callback(self._part_ended)
        if not parts:
            self._conclude()

    def _stop(self) -> None:
        for part in list(self._parts):
            part.cancel()

    def _part_ended(self, part: Future[TransferRecord]) -> None:
        error = part.exception(0)
        with self._lock:
            if self._error is None or isinstance(self._error, CancelledError):
                self._error = error or self._error
            self._pending -= 1
            last = self._pending == 0
        if error is not None and not last:
            self._stop()
        if last and self._run is not None:
            self._run(self._conclude)
        elif last:
            self._conclude()

    def _conclude(self) -> None:
        error = self._error
        try:
            error = self._finish(error) if self._finish is not None else error
        except BaseException as failure:
            error = failure
        outcome = error if error is not None else _sum(self._parts)
        # The parts hold this object in turn; without them, memory is let go at once.
        self._parts.clear()
        self._finish = None
        self.whole.end(outcome)


def _sum(parts: Sequence[Transfer]) -> TransferRecord:
    records = [part.result(0) for part in parts]
    by_path: dict[str, int] = {}
    for record in records:
        for path, nbytes in record.by_path.items():
            by_path[path] = by_path.get(path, 0) + nbytes
    return TransferRecord(
        sum(record.nbytes for record in records),
        max((record.seconds for record in records), default=0.0),
        by_path,
    )
