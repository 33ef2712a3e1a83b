"""The threads that give operations to kvikio: few, since kvikio has threads of its own."""

from __future__ import annotations

import errno
import threading
from collections import deque
from itertools import islice

from tensorspill.errors import BrokenError
from tensorspill.gds.part import Part
from tensorspill.pool.cuda.contexts import current

__all__ = ["FEEDERS", "Feeders"]

#: What is below kvikio's threshold, kvikio does in the thread that asks for it.
FEEDERS = 4

#: How many of them may wait for a stream while others look for parts that can begin.
WAITING = FEEDERS - 2

#: Seconds between looks at parts that wait for a stream.
POLL = 0.002

#: How far from the front parts are looked for.
LOOK = 64


class Feeders:
    """Daemon threads that live from the first part to `stop`.

    Parts begin in the order of `put`, except that one whose memory is ready overtakes those that
    wait for a stream.

    Parameters
    ----------
    device : int
        Number of the GPU.
    depth : int
        Operations of a part under way at a time.
    path : str
        What errors name.
    """

    def __init__(self, device: int, depth: int, path: str) -> None:
        self._device = device
        self._depth = depth
        self._path = path
        self._changed = threading.Condition(threading.Lock())
        self._parts: deque[Part] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._waiting = 0
        self._stopped = False

    def put(self, parts: list[Part]) -> None:
        """Hand over the parts of a transfer.

        Raises
        ------
        BrokenError
            There is no room for a thread; nothing was handed over.
        """
        with self._changed:
            if len(self._threads) < FEEDERS and self._idle < len(self._parts) + len(parts):
                self._hire()
            self._parts.extend(parts)
            self._changed.notify(len(parts))

    def _hire(self) -> None:
        name = f"tensorspill-gds-{len(self._threads)}"
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if self._threads:
                return
            raise BrokenError.from_errno(
                errno.EAGAIN, f"The GDS engine: {error}", path=self._path
            ) from error
        self._threads.append(thread)

    @property
    def is_current(self) -> bool:
        """Whether the caller is one of the threads."""
        return threading.current_thread() in self._threads

    def stop(self) -> None:
        """End the threads after the parts they have; returns when they are gone."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (part := self._take()) is not None:
            with current(self._device):
                part.run(self._depth)
            # Not kept until the next one comes: it owns memory.
            del part

    def _take(self) -> Part | None:
        """Return a part whose memory is ready; None at the end."""
        with self._changed:
            while True:
                if (part := self._ready_part()) is not None:
                    return part
                if self._parts and self._waiting < WAITING:
                    self._waiting += 1
                    break
                if self._stopped and not self._parts:
                    return None
                self._idle += 1
                try:
                    # An event tells nobody that it has come.
                    self._changed.wait(POLL if self._parts else None)
                finally:
                    self._idle -= 1
            part = self._parts.popleft()
        with current(self._device):
            part.wait_ready()
        with self._changed:
            self._waiting -= 1
            # Another thread may wait for a stream now.
            self._changed.notify()
        return part

    def _ready_part(self) -> Part | None:
        for position, part in enumerate(islice(self._parts, LOOK)):
            if part.is_ready:
                del self._parts[position]
                return part
        return None
