"""Batches of what is asked for one at a time: while some is under way, the rest is collected.

A batch of a dozen small requests costs hardly more than a batch of one.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import numpy as np

from tensorspill.engine import Engine, File, Request, Transfer
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.pool.live import live_ranges

__all__ = ["Batching", "Group"]

#: What is collected is submitted at the latest when it has this many bytes or requests: larger
#: batches bring nothing, and the drive should have enough to do.
ENOUGH_BYTES = 8 << 20
ENOUGH_REQUESTS = 64
#: A request of so many bytes is not kept waiting for others.
LARGE_BYTES = 4 << 20
#: Seconds to wait for more when all that was under way has ended: where opening files takes longer
#: than moving them, batches would be of one or two.
PATIENCE = 0.001


class Group:
    """Requests to one engine, submitted as one batch, or each by itself if that goes wrong.

    So what one of them ends with does not depend on the others.

    Parameters
    ----------
    engine : Engine
    ended : callable
        Called with a transfer that has ended, mostly in a thread of the engine.

    Attributes
    ----------
    requests : list of Request
    nbytes : int
        Of all of them.
    """

    def __init__(self, engine: Engine, ended: Callable[[object], None]) -> None:
        self.requests: list[Request] = []
        self.nbytes = 0
        self._engine = engine
        self._ended = ended
        self._lock = threading.Lock()
        # Nobody may free the memory while it waits for its transfer.
        self._addresses, self._sizes = (np.zeros(ENOUGH_REQUESTS, np.int64) for _ in range(2))
        self._token = live_ranges.add(self._addresses, self._sizes)
        #: One for all requests, or one for each; an error in place of one that could not start.
        self._started: list[Transfer | Exception] = []
        self._is_moved = False

    @property
    def is_running(self) -> bool:
        """Whether a transfer is under way."""
        return any(isinstance(one, Transfer) and not one.done() for one in self._started)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is under way, nor left to be started."""
        return not self.is_running and not self._is_to_be_divided()

    def add(self, request: Request) -> int:
        """Take a request, of a tensor, for `submit`; return its number.

        There may be `ENOUGH_REQUESTS`.
        """
        number = len(self.requests)
        nbytes = request.buffer.nbytes
        self._addresses[number], self._sizes[number] = request.buffer.data_ptr(), nbytes
        self.requests.append(request)
        self.nbytes += nbytes
        return number

    def uses(self, file: File) -> bool:
        """Whether a request is to or from a file."""
        return any(request.file is file for request in self.requests)

    def submit(self) -> None:
        """Start all of them, once; what can't be one batch starts one by one, in order."""
        self._started = [self._start(self.requests)]
        if isinstance(self._started[0], Exception):
            self._divide()
        live_ranges.remove(self._token)

    def settle(self) -> None:
        """Wait for the batch, and if it failed start each request by itself.

        All of them, since a batch does not say which were moved before it failed; what was moved
        is moved again, to the same place.
        """
        with self._lock:
            if self._is_to_be_divided():
                self._divide()

    def result(self, number: int) -> None:
        """Wait for one request, and raise what went wrong with it."""
        if self._is_moved:
            return
        self.settle()
        one = self._started[number if len(self._started) > 1 else 0]
        if isinstance(one, Exception):
            raise one
        one.result()
        self._is_moved = len(self._started) == 1

    def wait(self) -> None:
        """Wait for all of them; what went wrong is not raised."""
        self.settle()
        for one in self._started:
            _error(one)

    def _is_to_be_divided(self) -> bool:
        """Wait for the batch, and say whether it failed for the sake of one request."""
        if len(self._started) == len(self.requests):
            return False
        error = _error(self._started[0])
        return error is not None and not isinstance(error, CancelledError)

    def _divide(self) -> None:
        with HeldInterrupts():
            self._started = [self._start([request]) for request in self.requests]

    def _start(self, requests: list[Request]) -> Transfer | Exception:
        try:
            transfer = self._engine.submit(requests)
        except Exception as error:
            return error
        transfer.add_done_callback(self._ended)
        return transfer


class Batching:
    """Takes requests one at a time, and submits them in batches.

    What is added starts at once if nothing is under way; else together with what is added after
    it, as soon as that is enough, or `PATIENCE` after what is under way has ended.
    """

    def __init__(self) -> None:
        # Entered again by who submits, if a transfer has ended by then.
        self._lock = threading.RLock()
        self._queue: dict[Engine, Group] = {}
        self._submitted: list[Group] = []
        #: Whether a thread of an engine waits for more, and what ends that.
        self._collecting = False
        self._enough = threading.Event()
        self._pid = os.getpid()

    def add(self, engine: Engine, request: Request) -> tuple[Group, int]:
        """Take a request, of a tensor; return its group and its number in there.

        GPU memory is submitted at once: it is touched after what is on the caller's stream now.
        """
        with self._lock:
            group = self._queue.get(engine)
            if group is None:
                group = self._queue[engine] = Group(engine, self._go_on)
            number = group.add(request)
            enough = (
                group.nbytes >= ENOUGH_BYTES
                or number + 1 >= ENOUGH_REQUESTS
                or request.buffer.nbytes >= LARGE_BYTES
                or engine.device.type != "cpu"
            )
            if enough or (not self._collecting and self._is_idle()):
                self._submit()
        return group, number

    def flush(self) -> None:
        """Submit what is collected."""
        with self._lock:
            if self._queue:
                self._submit()

    def let_go(self, file: File) -> None:
        """Do what needs a file that is to be closed, as far as it has to be submitted for that."""
        with self._lock:
            if any(group.uses(file) for group in self._queue.values()):
                self._submit()
            groups = [group for group in self._submitted if group.uses(file)]
        for group in groups:
            group.settle()

    def finish(self) -> None:
        """Submit what is collected, and wait for all there is; what went wrong is not raised.

        In a forked child there is nothing to do, and a lock may be held by nobody.
        """
        if os.getpid() != self._pid:
            return
        self.flush()
        for group in self._submitted:
            group.wait()

    def _is_idle(self) -> bool:
        # The last one mostly ends last.
        if self._submitted and self._submitted[-1].is_running:
            return False
        self._submitted = [group for group in self._submitted if not group.is_settled]
        return not any(group.is_running for group in self._submitted)

    def _submit(self) -> None:
        # Who waits for what is under way must find it.
        with HeldInterrupts():
            queue, self._queue = self._queue, {}
            for group in queue.values():
                group.submit()
                self._submitted.append(group)
            if self._collecting:
                self._enough.set()

    def _go_on(self, _: object) -> None:
        """Forget what has ended, and go on with what was collected meanwhile and comes now."""
        with self._lock:
            if not self._is_idle() or not self._queue or self._collecting:
                return
            self._collecting = True
            self._enough.clear()
        self._enough.wait(PATIENCE)
        with self._lock:
            self._collecting = False
            if self._queue and self._is_idle():
                self._submit()


def _error(one: Transfer | Exception) -> BaseException | None:
    """Wait for a transfer and return its error."""
    return one if isinstance(one, Exception) else one.exception()
