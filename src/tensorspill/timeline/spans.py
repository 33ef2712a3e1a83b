"""Spans of time: what was computed, moved or waited for, told to whoever records."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Any, Literal, Protocol

from tensorspill.engine.transfer import Transfer

__all__ = ["Kind", "Listener", "Span", "add_listener", "remove_listener", "span", "watch"]

Kind = Literal["compute", "transfer", "stall"]

_NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time.

    Attributes
    ----------
    kind : {"compute", "transfer", "stall"}
        Stall is compute that waits for a transfer.
    name : str
    begin, end : float
        Seconds, of `time.perf_counter`.
    thread : int
        Which computed or waited; 0 for a transfer.
    nbytes : int
        Moved by a transfer.
    written : bool
        To the drive, not from it.
    by_path : mapping of str to int
        `nbytes` divided among the paths taken.
    """

    kind: Kind
    name: str
    begin: float
    end: float
    thread: int = 0
    nbytes: int = 0
    written: bool = False
    by_path: Mapping[str, int] = field(default_factory=lambda: _NOTHING)


class Listener(Protocol):
    """Is told of spans, from any thread."""

    def begun(self, kind: Kind, name: str) -> None:
        """Note that this thread begins to compute or to wait."""

    def ended(self, span: Span) -> None:
        """Note what has ended."""


_listeners: tuple[Listener, ...] = ()
_changing = threading.Lock()
_nobody_listens: AbstractContextManager[None] = nullcontext()


def add_listener(listener: Listener) -> None:
    """Tell a listener of spans from now on."""
    global _listeners
    with _changing:
        _listeners = (*_listeners, listener)


def remove_listener(listener: Listener) -> None:
    """Tell a listener no more; one that was not told does no harm."""
    global _listeners
    with _changing:
        _listeners = tuple(known for known in _listeners if known is not listener)


def span(kind: Kind, name: str) -> AbstractContextManager[None]:
    """Return a context whose time counts as `kind`; costs next to nothing while nobody records."""
    listeners = _listeners
    return _Open(kind, name, listeners) if listeners else _nobody_listens


def watch(transfer: Transfer, name: str, *, written: bool) -> None:
    """Count a transfer that was just begun, until it ends.

    Parameters
    ----------
    transfer : Transfer
        One that fails counts as well, with no bytes.
    name : str
        What is moved.
    written : bool
        To the drive, not from it.
    """
    if _listeners:
        transfer.add_done_callback(partial(_moved, time.perf_counter(), name, written))


def _moved(begin: float, name: str, written: bool, transfer: Any) -> None:
    nbytes, by_path = 0, _NOTHING
    if transfer.exception(0) is None:
        record = transfer.result(0)
        nbytes, by_path = record.nbytes, record.by_path
    _tell(Span("transfer", name, begin, time.perf_counter(), 0, nbytes, written, by_path))


def _tell(ended: Span) -> None:
    for listener in _listeners:
        listener.ended(ended)


class _Open:
    """A span under way."""

    __slots__ = ("_begin", "_kind", "_listeners", "_name")

    def __init__(self, kind: Kind, name: str, listeners: tuple[Listener, ...]) -> None:
        self._kind = kind
        self._name = name
        self._listeners = listeners
        self._begin = 0.0

    def __enter__(self) -> None:
        for listener in self._listeners:
            listener.begun(self._kind, self._name)
        self._begin = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        ended = Span(
            self._kind, self._name, self._begin, time.perf_counter(), threading.get_ident()
        )
        # Those of the beginning: each is told of both ends.
        for listener in self._listeners:
            listener.ended(ended)
