"""Holding Ctrl-C back over a few lines that must run to their end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any

__all__ = ["HeldInterrupts"]


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
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):
            self._handler = handler
            try:
                signal.signal(signal.SIGINT, self._note)
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
        handler, self._handler = self._handler, None
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
            if self._came:
                handler(signal.SIGINT, None)
