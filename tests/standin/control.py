"""In a process of a lane: failures, counters and gauges of the stand-ins.

The names of counters are those of functions without a version ("cuMemcpyHtoDAsync"); the language
of the rules is described in ``sources/control.h``.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Library", "cuda", "cufile"]


class Library:
    """One stand-in, as loaded in this process."""

    def __init__(self, part: str, library: ctypes.CDLL) -> None:
        self._part = part
        self._library = library
        self._rules = os.environ.get(f"STANDIN_{part.upper()}_RULES", "")
        self._function("gauge").restype = ctypes.c_long
        self._function("count").restype = ctypes.c_ulong
        self._function("counts").restype = ctypes.c_size_t

    def _function(self, name: str) -> ctypes._NamedFuncPointer:
        found: ctypes._NamedFuncPointer = getattr(self._library, f"standin_{self._part}_{name}")
        return found

    def count(self, function: str) -> int:
        """Return how often a function was called, failures included."""
        return int(self._function("count")(function.encode()))

    def counts(self) -> dict[str, int]:
        """Return how often each function was called."""
        room = ctypes.create_string_buffer(1 << 16)
        self._function("counts")(room, ctypes.c_size_t(len(room)))
        lines = (line.split() for line in room.value.decode().splitlines())
        return {name: int(calls) for name, calls in lines if int(calls)}

    def reset_counts(self) -> None:
        """Start all counters at 0 again."""
        self._function("reset_counts")()

    def rules(self, text: str) -> None:
        """Replace all rules; "" for none."""
        if self._function("rules")(text.encode()):
            raise ValueError(f"{text!r} are no rules")
        self._rules = text

    @contextmanager
    def failing(self, text: str) -> Iterator[None]:
        """Have rules in force for a while, in place of those that were and will be."""
        before = self._rules
        self.rules(text)
        try:
            yield
        finally:
            self.rules(before)

    def gauge(self, name: str, device: int = -1) -> int:
        """Return something that goes up and down, of one device or of all.

        "cuda" has contexts, contexts made, allocations, bytes, page-locked, page-locked bytes,
        streams, events, freed while registered, freed in use. "cufile" has registered buffers,
        registered files, pinned bytes, registered bytes moved, bounced bytes moved, deregistered in
        use, opened.
        """
        value = int(self._function("gauge")(name.encode(), device))
        if value < 0:
            raise ValueError(f"{name!r} is no gauge of {self._part}")
        return value

    @contextmanager
    def holding(self, stream: int) -> Iterator[None]:
        """Keep a stream (of "cuda") from working for a while; its context must be current."""
        self._hold(stream, True)
        try:
            yield
        finally:
            self._hold(stream, False)

    def _hold(self, stream: int, held: bool) -> None:
        if code := self._function("hold")(ctypes.c_void_p(stream), int(held)):
            raise ValueError(f"stream {stream:#x} can't be held: CUDA error {code}")

    def reuse_addresses(self, wanted: bool) -> None:
        """Have freed device addresses (of "cuda") handed out again at once, or never."""
        self._function("reuse")(int(wanted))


@functools.cache
def cuda() -> Library:
    """Return the stand-in for the driver."""
    return Library("cuda", ctypes.CDLL("libcuda.so.1"))


@functools.cache
def cufile() -> Library:
    """Return the stand-in for cuFile (only in the lane ``cufile``)."""
    return Library("cufile", ctypes.CDLL("libcufile.so.0"))
