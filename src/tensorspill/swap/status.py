"""What a swapper says: the status of a parameter, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from tensorspill.pool.buffer_pool import PoolStatistics
from tensorspill.spill.records import SpillStatistics

__all__ = ["SwapStatus", "SwapperStatistics"]


class SwapStatus(Enum):
    """Where the value of a parameter is."""

    #: In memory; the parameter can be used.
    AVAILABLE = "available"
    #: On the drive only; the parameter's data is a placeholder.
    NOT_AVAILABLE = "not available"
    #: Being read or written.
    INFLIGHT = "in flight"


@dataclass(frozen=True, slots=True)
class SwapperStatistics:
    """The state of a swapper and what it did.

    Attributes
    ----------
    available, not_available, inflight : int
        Parameters that the swapper knows, by status.
    swapped_in, swapped_out, failures : int
        Parameters read and written, and those of which that failed or was cancelled.
    bytes_in, bytes_out : int
        Their bytes, without failures.
    idle_bytes : int
        Memory that is free for parameters; part of what the pool calls allocated.
    pool : PoolStatistics
    file : SpillStatistics
    """

    available: int
    not_available: int
    inflight: int
    swapped_in: int
    swapped_out: int
    failures: int
    bytes_in: int
    bytes_out: int
    idle_bytes: int
    pool: PoolStatistics
    file: SpillStatistics
