"""Holding Ctrl-C back over a few lines that must run to their end."""

from __future__ import annotations

import importlib
import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["HeldInterrupts"]

#: The functions in C: `signal` looks every handler up among its enums, in vain, which made a block
#: take 22 µs in place of 1, some hundred times in a step that spills.
_signal: Any = importlib.import_module("_signal")

#: Whether a block of the main thread is under way; one inside of it has nothing to do.
_held = False


class HeldInterrupts:
    """Context manager: a Ctrl-C inside the block takes effect when the block has ended.

    For blocks of micro- or milliseconds that change several things at once and never wait. Only
    the main thread's Python code can be interrupted, so elsewhere this does nothing. Blocks nest.
    """

    __slots__ = ("_came", "_handler")

    def __init__(self) -> None:
        self._handler: Callable[[int, Any], Any] | None = None
        self._came = False

    def __enter__(self) -> None:
        global _held
        if _held or threading.get_ident() != threading.main_thread().ident:
            return
        handler = _signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            try:
                _signal.signal(signal.SIGINT, self._note)
                _held = True
            except ValueError:  # a sub-interpreter, which no signal interrupts
                self._handler = None

    def _note(self, *_: object) -> None:
        self._came = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        global _held
        handler, self._handler = self._handler, None
        if handler is not None:
            _held = False
            _signal.signal(signal.SIGINT, handler)
            if self._came:
                handler(signal.SIGINT, None)
