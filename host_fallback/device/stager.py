"""The thread that moves staging blocks between GPU memory, the host path and files."""

from __future__ import annotations

import contextlib
import errno
import logging
import queue
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial

from tensorspill.engine.batch import Batch
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import BrokenError, SpillError
from tensorspill.host_fallback.device.blocks import Blocks
from tensorspill.host_fallback.device.copies import Copier, Meter
from tensorspill.host_fallback.device.marks import Marks
from tensorspill.host_fallback.device.options import StagedOptions
from tensorspill.host_fallback.device.work import Flight, Leg, Work
from tensorspill.host_fallback.engine import AioEngine
from tensorspill.pool.cuda.contexts import current

__all__ = ["Stager"]

log = logging.getLogger(__name__)


class Stager:
    """A daemon thread that lives from the first `put` to `stop`.

    A write is copied to a staging block, then handed to the host path; a read comes from there, and
    is copied. Both take their blocks from one supply, and where both want one, the direction that
    has fewer goes first. What is copied is ready: a transfer whose stream has not come to its mark
    holds nobody up. Its reads are fetched meanwhile, into half of the blocks.

    Parameters
    ----------
    device : int
        Number of the GPU.
    options : StagedOptions
    ledger : Ledger
        Of the engine that is served.
    inner : AioEngine
        The host path; closed by the caller.
    """

    def __init__(
        self, device: int, options: StagedOptions, ledger: Ledger, inner: AioEngine
    ) -> None:
        self._device = device
        self._options = options
        self._ledger = ledger
        self._inner = inner
        self.meter = Meter()
        self.staging_bytes = 0
        #: Works that come, flights that the host path is done with; None to look around.
        self._inbox: queue.SimpleQueue[Work | Flight | None] = queue.SimpleQueue()
        self._stopping = False
        self._starting = threading.Lock()
        name = "tensorspill-staging"
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._works: dict[Work, None] = {}
        self._marks = Marks()
        self._legs: dict[bool, deque[Leg]] = {True: deque(), False: deque()}
        self._held = {True: 0, False: 0}
        #: In the order of their copies; and reads that wait for the caller's stream.
        self._copying: deque[Flight] = deque()
        self._parked: list[Flight] = []
        self._blocks: Blocks | None = None
        self._copiers: dict[bool, Copier] = {}

    # -- for any thread ------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread, unless it was started.

        Raises
        ------
        BrokenError
            There is no room for a thread; a later call may find some.
        """
        with self._starting:
            if self._thread.ident is None:
                try:
                    self._thread.start()
                except RuntimeError as error:
                    raise BrokenError.from_errno(
                        errno.EAGAIN, f"The engine's thread: {error}", path=self._ledger.path
                    ) from error

    def put(self, batch: Batch, transfer: Transfer) -> None:
        """Take over a transfer."""
        work = Work(self._ledger, batch, transfer, partial(self._inbox.put, None))
        transfer.on_cancel(work.stop)
        self._inbox.put(work)

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in a thread that this one may have to wait for."""
        return threading.current_thread() is self._thread or self._inner.is_current

    def stop(self) -> None:
        """End the thread; no transfer may be under way."""
        self._stopping = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join()

    # -- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with current(self._device):
                try:
                    self._serve()
                finally:
                    self._let_go()
        except BaseException as error:
            log.exception("The engine for GPU memory failed")
            self._refuse(error)

    def _serve(self) -> None:
        while not self._stopping:
            if self._step():
                continue
            if self._copying:
                # Nothing to do before: these are ready, and over in a millisecond.
                self._finish_copy(self._copying[0], wait=True)
            else:
                self._wait()

    def _step(self) -> bool:
        """Do what can be done at once; whether there was anything."""
        busy = self._take_messages()
        while self._copying and self._finish_copy(self._copying[0], wait=False):
            busy = True
        if self._marks.look():
            self._drop_stopped()
            self._unpark()
            busy = True
        while self._start_next():
            busy = True
        return busy

    def _wait(self) -> None:
        """Wait for a message, or until callers' streams are to be looked at."""
        try:
            message = self._inbox.get(timeout=self._marks.timeout)
        except queue.Empty:
            return
        self._handle(message)

    def _take_messages(self) -> bool:
        busy = False
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return busy
            self._handle(message)
            busy = True

    def _handle(self, message: Work | Flight | None) -> None:
        if isinstance(message, Work):
            self._enter(message)
        elif isinstance(message, Flight):
            self._arrived(message)
        else:
            self._drop_stopped()

    def _enter(self, work: Work) -> None:
        self._works[work] = None
        try:
            self._provide()
            work.arrange(self._options.staging_block)
        except (SpillError, MemoryError) as error:
            work.fail(error)
        for leg in work.legs:
            self._legs[leg.write].append(leg)
        self._marks.enter(work)
        if work.stopped:
            self._drop_stopped()
        self._conclude(work)

    def _provide(self) -> None:
        """Take memory and streams, unless they are there."""
        for write in (True, False):
            if write not in self._copiers:
                self._copiers[write] = Copier(self._device)
        if self._blocks is None:
            self._blocks = Blocks(self._options, self._device, self._ledger.note)
            self.staging_bytes = self._blocks.nbytes

    # -- from block to block -------------------------------------------------------------------

    def _start_next(self) -> bool:
        """Start one block; whether there was one to start, and room for it."""
        blocks = self._blocks
        if blocks is None:
            return False
        for write in sorted((True, False), key=self._held.__getitem__):
            leg = next(self._startable(write), None)
            if leg is None:
                continue
            block = blocks.take()
            if block is None:
                return False
            self._held[write] += 1
            flight = leg.start(block, blocks.address(block))
            if leg.over:
                self._legs[write].remove(leg)
            if write:
                self._copy(flight)
            else:
                self._submit(flight)
            return True
        return False

    def _startable(self, write: bool) -> Iterator[Leg]:
        """Yield legs of which a block may be started."""
        ahead = not write and self._may_fetch_ahead()
        for leg in self._legs[write]:
            if not leg.work.stopped and (leg.work.ready or ahead):
                yield leg

    def _may_fetch_ahead(self) -> bool:
        """Whether a read may have a block that it can't empty yet."""
        return self._blocks is not None and self._marks.flights < self._blocks.count // 2

    def _copy(self, flight: Flight) -> None:
        """Put a block's copies on the stream."""
        assert self._blocks is not None
        event = self._blocks.events[flight.block]
        copier = self._copiers[flight.leg.write]
        try:
            copier.copy(*flight.ranges(), event)
        except SpillError as error:
            flight.work.fail(error)
            with contextlib.suppress(SpillError):
                copier.synchronize()
            self._end(flight)
            return
        flight.begun = self.meter.began()
        self._copying.append(flight)

    def _finish_copy(self, flight: Flight, wait: bool) -> bool:
        """Go on with a block if its copy, the oldest, is done; whether it was."""
        assert self._blocks is not None
        event = self._blocks.events[flight.block]
        try:
            if wait:
                event.synchronize()
            elif not event.query():
                return False
        except SpillError as error:
            flight.work.fail(error)
        self._copying.popleft()
        self.meter.ended(flight.begun, flight.nbytes)
        if flight.leg.write and not flight.work.stopped:
            self._submit(flight)
        else:
            if flight.leg.write:
                flight.work.drop()
            self._end(flight)
        return True

    def _submit(self, flight: Flight) -> None:
        """Hand a block to the host path."""
        try:
            flight.transfer = self._inner.submit(flight.batch)
        except SpillError as error:
            flight.work.fail(error)
            self._end(flight)
            return
        flight.transfer.add_done_callback(partial(self._note_arrival, flight))

    def _note_arrival(self, flight: Flight, _: Future[object]) -> None:
        self._inbox.put(flight)

    def _arrived(self, flight: Flight) -> None:
        """Go on with a block that the host path is done with."""
        assert flight.transfer is not None
        error, work = flight.transfer.exception(0), flight.work
        if error is None:
            work.count(flight.transfer.result(0))
        else:
            work.fail(error)
        if flight.leg.write or work.stopped:
            if not flight.leg.write:
                work.drop()
            self._end(flight)
        elif work.ready:
            self._copy(flight)
        else:
            self._parked.append(flight)

    def _unpark(self) -> None:
        """Go on with blocks that waited for the caller's stream and need to no longer."""
        parked, self._parked = self._parked, []
        for flight in parked:
            if flight.work.stopped:
                flight.work.drop()
                self._end(flight)
            elif flight.work.ready:
                self._copy(flight)
            else:
                self._parked.append(flight)

    # -- ends ----------------------------------------------------------------------------------

    def _end(self, flight: Flight) -> None:
        """Take a block back."""
        assert self._blocks is not None
        self._blocks.give_back(flight.block)
        self._held[flight.leg.write] -= 1
        work = flight.work
        work.flights.discard(flight)
        # Its callbacks refer to the flight in turn, and so to the caller's memory.
        flight.transfer = None
        if work.stopped:
            self._drop_stopped()
        self._conclude(work)

    def _drop_stopped(self) -> None:
        """Start nothing more of works that failed or were cancelled."""
        stopped = [work for work in self._works if work.stopped]
        for work in stopped:
            work.cancel_flights()
            for leg in work.legs:
                if not leg.over:
                    leg.drop()
                    with contextlib.suppress(ValueError):
                        self._legs[leg.write].remove(leg)
            self._conclude(work)
        if stopped and self._parked:
            self._unpark()

    def _conclude(self, work: Work) -> None:
        if work.over and work in self._works:
            del self._works[work]
            self._marks.leave(work)
            work.end()

    def _let_go(self) -> None:
        """Give up memory and streams once everything that uses them is done."""
        if self._works:
            # Something failed that must not. The kernel may still fill blocks.
            self._inner.close()
        for copier in self._copiers.values():
            with contextlib.suppress(SpillError):
                copier.synchronize()
            copier.close()
        if self._blocks is not None:
            self._blocks.close()
            self._blocks = None
            self.staging_bytes = 0

    def _refuse(self, cause: BaseException) -> None:
        """Fail all there is and all that comes, until `stop`."""
        error = BrokenError(f"The engine for GPU memory failed: {cause}", path=self._ledger.path)
        error.__cause__ = cause
        while self._works:
            work, _ = self._works.popitem()
            work.fail(error)
            work.end()
        while not self._stopping:
            message = self._inbox.get()
            if isinstance(message, Work):
                message.fail(error)
                message.end()
