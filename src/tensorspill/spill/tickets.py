"""Waiting for a change without holding anything."""

from __future__ import annotations

import threading

__all__ = ["Ticket"]


class Ticket:
    """Something to wait for: any change after which it is worth trying again.

    Waiting happens outside all locks, so that an interrupt there leaves nothing behind.
    """

    __slots__ = ("_gate",)

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def wait(self) -> None:
        """Wait for the change; called once."""
        self._gate.acquire()

    def call(self) -> None:
        """End the wait; called once."""
        self._gate.release()
