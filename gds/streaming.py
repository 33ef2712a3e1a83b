"""Operations that a CUDA stream runs, in order with the caller's stream, where cuFile can.

An operation that kvikio's threads run first waits for the GPU's default stream, and so for whatever
was computed on it. One on a stream of ours waits for what the caller named, and the caller's stream
can wait for it in turn, without a thread that waits on the host.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from tensorspill.engine.transfer import Transfer
from tensorspill.gds.failures import Failure, decode, find_lost, short
from tensorspill.gds.part import Part, View
from tensorspill.gds.paths import Path
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import status
from tensorspill.pool.cuda.streams import Event, Stream

__all__ = ["StreamedPart", "Streams"]

Table = NDArray[Any]

#: Operations on the streams at a time: what is there can't be cancelled any more, and the caller's
#: thread puts it there. More wait with the threads.
MOST = 64

#: Streams of an engine; cuFile runs one operation of a stream at a time.
STREAMS = 4

#: Seconds after which a stream counts as busy; marks on an idle one take some microseconds to pass.
GRACE = 50e-6

#: Offset in the buffer, offset in the file and size do not change after the call.
_FIXED = 1 | 2 | 4


class StreamedPart(Part):
    """A batch that was put on streams; a thread waits for its end and looks at the outcome."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._futures: list[tuple[int, Any]] = []
        self._last: Event | None = None
        #: Whether a stream may have been told to go on without looking at the outcome.
        self._promised = False

    @property
    def is_ready(self) -> bool:
        """Whether the streams have done it."""
        return self._last is None or self._last.query()

    def wait_ready(self) -> None:
        """Wait for the streams."""
        if self._last is not None:
            self._last.synchronize()

    def enqueue(self, streams: list[Stream], transfer: Transfer) -> Failure | None:
        """Put the operations on streams, in turn; stops at the first that is refused.

        Returns
        -------
        Failure or None
            Why cuFile refused; `run` does the rest without streams.
        """
        used: dict[int, Stream] = {}
        failure = None
        for row in range(len(self.operations)):
            number = row % len(streams)
            if number not in used:
                used[number] = streams[number]
                if self.ready is not None:
                    streams[number].wait(self.ready)
            failure = self._enqueue_one(row, streams[number])
            if failure is not None:
                break
        if used:
            self._last = _join(list(used.values()))
        if failure is None and self._last is not None:
            self._promised = True
            transfer.ends_after(self._last)
        return failure

    def _enqueue_one(self, row: int, stream: Stream) -> Failure | None:
        address, nbytes, offset, number, write = self.operations[row].item()
        handle = self.files[number].handle
        assert handle is not None  # what has none is not put on streams
        start = handle.file.raw_write_async if write else handle.file.raw_read_async
        try:
            future = start(View(address, nbytes), stream.handle, nbytes, offset, 0)
        except RuntimeError as error:
            return decode(error)
        self._futures.append((row, future))
        return None

    def _do(self, depth: int) -> None:
        now = time.perf_counter()
        for row, future in self._futures:
            self._begun[row] = now
            self._look(row, future)
        begun = len(self._futures)
        self._futures.clear()
        self._pump(range(begun, len(self.operations)), depth)

    def _look(self, row: int, future: Any) -> None:
        """Account an operation that its stream has done."""
        _, nbytes, offset, number, write = self.operations[row].item()
        try:
            moved = future.check_bytes_done()
        except RuntimeError as error:
            found = decode(error)
            if write:
                found = find_lost(found, self.files[number].fd, offset, nbytes)
            failure: Failure | None = found
        else:
            failure = None if moved == nbytes else short(moved, nbytes, self._ends_early(row))
        if failure is None:
            self.succeeded(row)
        else:
            # A stream that waited for the transfer has gone on with what was not moved.
            self.failed(row, failure, may_fall_back=not self._promised)


class Streams:
    """The streams of an engine, made at the first use.

    Parameters
    ----------
    device : int
        Number of the GPU.
    wanted : {"auto", "yes", "no"}
        See `GdsOptions.stream_ordered`.
    possible : bool
        Whether the probe could do it.
    note : callable
        Takes a line for the statistics.
    """

    def __init__(
        self, device: int, wanted: str, possible: bool, note: Callable[[str], None]
    ) -> None:
        self._device = device
        self._wanted = wanted
        self._possible = possible and wanted != "no"
        self._note = note
        self._lock = threading.Lock()
        self._streams: list[Stream] = []
        self._under_way = 0

    def take(
        self, operations: Table, path: Table, rest: tuple[Any, ...], transfer: Transfer
    ) -> StreamedPart | None:
        """Put a batch on the streams if it may and should be; else return None.

        Parameters
        ----------
        operations, path, rest
            What a `Part` is made of.
        """
        if not self._possible or (path > Path.BOUNCE).any():
            return None
        if self._under_way + len(operations) > MOST:
            return None
        if self._wanted == "auto" and not self._would_wait(transfer):
            return None
        part = StreamedPart(operations, path, *rest)
        if any(file.host is not None or file.handle is None for file in part.files):
            return None
        if part.beyond_end() is not None:
            return None
        with self._lock, current(self._device):
            self._under_way += len(operations)
            part.progress.at_end(partial(self._ended, len(operations)))
            failure = part.enqueue(self._all(), transfer)
        if failure is not None:
            self._possible = False
            self._note(f"no stream-ordered operations any more: {failure.text}")
        return part

    def _would_wait(self, transfer: Transfer) -> bool:
        """Whether kvikio's threads would have to wait for a stream: the caller's, or the default.

        Before each operation kvikio waits for all that is on the default stream, whether or not
        the operation has to do with it.
        """
        until = time.perf_counter() + GRACE
        while transfer.ready is not None and not transfer.ready.query():
            if time.perf_counter() > until:
                return True
        with current(self._device):
            return status("cuStreamQuery", 0)[0] == "CUDA_ERROR_NOT_READY"

    def _ended(self, operations: int) -> None:
        with self._lock:
            self._under_way -= operations

    def _all(self) -> list[Stream]:
        if not self._streams:
            import kvikio

            for _ in range(STREAMS):
                stream = Stream(self._device)
                # It says nothing about failures; the operations will.
                kvikio.stream_register(stream.handle, _FIXED)
                self._streams.append(stream)
        return self._streams

    def close(self) -> None:
        """Give the streams back; nothing may be under way. A second time does no harm."""
        import kvikio

        with self._lock:
            while self._streams:
                stream = self._streams.pop()
                kvikio.stream_deregister(stream.handle)
                stream.close()


def _join(streams: list[Stream]) -> Event:
    """Return an event that comes when all streams have done what they were given."""
    first = streams[0]
    for other in streams[1:]:
        done = Event(other.device)
        done.record(other)
        first.wait(done)
    last = Event(first.device)
    last.record(first)
    return last
