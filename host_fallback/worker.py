"""A worker: the thread that owns a ring and feeds it jobs."""

from __future__ import annotations

import errno
import logging
import queue
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tensorspill.engine.latencies import Latencies
from tensorspill.engine.ledger import Ledger
from tensorspill.errors import BrokenError
from tensorspill.host_fallback.job import Job
from tensorspill.host_fallback.layout import Mode, Path
from tensorspill.host_fallback.options import AioOptions
from tensorspill.host_fallback.ring_state import COUNT, ENDED, HEAD

if TYPE_CHECKING:
    from tensorspill.host_fallback.context import Context

__all__ = ["Worker"]

log = logging.getLogger(__name__)


class Worker:
    """A daemon thread that lives from `start` to `stop`.

    It is a daemon so that it never keeps a process alive; the engine's finalizer drains it before
    the interpreter goes down.
    """

    def __init__(self, name: str, options: AioOptions, ledger: Ledger) -> None:
        self._options = options
        self._ledger = ledger
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        #: Shared with the ring: not 0 when the inbox has something.
        self._flag = np.zeros(1, "i8")
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.staging_bytes = 0

    def start(self) -> None:
        """Start the thread, unless it was started; not from two threads at a time.

        Raises
        ------
        BrokenError
            There is no room for a thread; a later call may find some.
        """
        if self._thread.ident is None:
            try:
                self._thread.start()
            except RuntimeError as error:
                raise BrokenError.from_errno(
                    errno.EAGAIN, f"The AIO engine: {error}", path=self._ledger.path
                ) from error

    def put(self, job: Job) -> None:
        """Hand a job to the thread."""
        self._inbox.put(job)
        self._flag[0] = 1

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in this worker's thread."""
        return threading.current_thread() is self._thread

    def stop(self) -> None:
        """End the thread after the jobs it has; returns when it is gone."""
        self._inbox.put(None)
        self._flag[0] = 1
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        active: dict[int, Job] = {}
        try:
            # Compiled code is loaded here and not at import: it takes a second or so.
            from tensorspill.host_fallback.context import Context

            context = Context(self._options, self._ledger.note)
        except BaseException as error:
            log.exception("The AIO engine can't start")
            self._refuse(active, error)
            return
        try:
            self._serve(context, active)
        except BaseException as error:
            log.exception("The AIO engine failed")
            # The kernel waits for what is under way. Only then may callers have their memory back.
            context.close()
            self._refuse(active, error)
        finally:
            context.close()

    def _refuse(self, active: dict[int, Job], cause: BaseException) -> None:
        """Fail all jobs that there are and all that come, until `stop`."""
        error = BrokenError(f"The AIO engine failed: {cause}", path=self._ledger.path)
        error.__cause__ = cause
        for job in active.values():
            job.fail(error)
        while (job_or_end := self._inbox.get()) is not None:
            job_or_end.fail(error)

    def _serve(self, context: Context, active: dict[int, Job]) -> None:
        from tensorspill.host_fallback.ring import FATAL, pump

        context.ring = context.ring._replace(inbox=self._flag)
        numbers = list(range(len(context.ring.jobs)))
        while True:
            if not self._take_jobs(context, active, numbers):
                return
            if pump(context.ring) == FATAL:
                raise OSError("io_getevents failed")
            self._end_jobs(context, active, numbers)

    def _take_jobs(self, context: Context, active: dict[int, Job], numbers: list[int]) -> bool:
        """Move jobs from the inbox to the ring; wait if it has none. False at the end."""
        # With all numbers taken, jobs wait for one to end; the ring must not come back for them.
        self._flag[0] = 0
        while numbers:
            # Cleared before looking, so that a job put meanwhile raises it again.
            self._flag[0] = 0
            try:
                job = self._inbox.get(block=not active)
            except queue.Empty:
                return True
            if job is None:
                return False
            number = numbers.pop()
            # First, so that the job ends with an error if it can't be entered.
            active[number] = job
            self._enter(context, job, number)
        return True

    def _enter(self, context: Context, job: Job, number: int) -> None:
        from tensorspill.host_fallback.segments import PACK_BELOW, cut

        if context.depth == 0:
            job.files["direct"] = -1
        job.cut(cut, PACK_BELOW)
        if (job.segments["mode"] == Mode.STAGED).any():
            if not context.provide_staging():
                job.files["direct"] = -1
                job.cut(cut, PACK_BELOW)
            self.staging_bytes = context.staging_bytes
        ring = context.ring
        job.enter(ring.jobs[number])
        ring.moved[number] = 0
        tail = (ring.state[HEAD] + ring.state[COUNT]) % len(ring.order)
        ring.order[tail] = number
        ring.state[COUNT] += 1

    def _end_jobs(self, context: Context, active: dict[int, Job], numbers: list[int]) -> None:
        ring = context.ring
        ended = ring.ended[: ring.state[ENDED]].tolist()
        ring.state[ENDED] = 0
        for number in ended:
            job = active.pop(number)
            numbers.append(number)
            times = _take_busy(ring.busy), _take_latencies(ring.latency)
            job.leave(ring.jobs[number], ring.moved[number], *times)


def _take_latencies(latency: np.ndarray[Any, Any]) -> dict[Path, Latencies]:
    """Return the times of each path's operations since the last call, and reset them."""
    used = np.flatnonzero(latency.any(axis=1)).tolist()
    taken = {Path(number): Latencies(latency[number].copy()) for number in used}
    latency[:] = 0
    return taken


def _take_busy(busy: np.ndarray[Any, Any]) -> dict[Path, float]:
    """Return the seconds that each path was busy since the last call, and reset them."""
    seconds = {path: ns / 1e9 for path, ns in zip(Path, busy[:, 2].tolist(), strict=True)}
    busy[:, 2] = 0
    return seconds
