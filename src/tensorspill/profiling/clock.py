"""Timing one action: wall clock and CPU seconds of the whole process, its threads included."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Sample", "idle_cpu_rate", "timed"]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run took.

    Attributes
    ----------
    seconds : float
        Wall clock.
    nbytes : int
        Bytes moved.
    cpu : float or None
        CPU seconds, user and system.
    count : int
        What else was counted meanwhile.
    """

    seconds: float
    nbytes: int
    cpu: float | None = None
    count: int = 0

    @property
    def gbps(self) -> float:
        """Rate in GB/s (decimal)."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else float("inf")


def idle_cpu_rate(seconds: float = 0.1) -> float:
    """Return the CPU seconds that this process uses in a second in which it does nothing."""
    cpu, begun = time.process_time(), time.perf_counter()
    time.sleep(seconds)
    return (time.process_time() - cpu) / (time.perf_counter() - begun)


def timed(action: Callable[[], object], nbytes: int, idle: float = 0.0) -> Sample:
    """Run an action and return what it took.

    Parameters
    ----------
    action : callable
    nbytes : int
        Bytes that it moves.
    idle : float
        CPU seconds a second that are not the action's, see `idle_cpu_rate`.
    """
    cpu, begun = time.process_time(), time.perf_counter()
    action()
    seconds = time.perf_counter() - begun
    used = time.process_time() - cpu
    return Sample(seconds, nbytes, max(0.0, used - idle * seconds))
