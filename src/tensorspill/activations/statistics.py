"""What an activation spill did, as a frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.pool.arena import PoolStatistics
from tensorspill.spill.records import SpillStatistics

__all__ = ["ActivationStatistics"]


@dataclass(frozen=True, slots=True)
class ActivationStatistics:
    """What an `ActivationSpill` did since it was made.

    Attributes
    ----------
    tensors : int
        Saved tensors that were taken.
    ranges : int
        Ranges of memory stored for them: tensors that share memory share one.
    left : int
        Saved tensors that were large enough but left in memory: parameters, their views and
        copies, and what others keep in memory anyway.
    live_bytes : int
        Bytes that autograd needs again now, wherever they are.
    held_bytes, most_held_bytes : int
        Bytes in memory that the drive does not have, since they are needed first or not written
        yet: now, and the most there were at once.
    bytes_out, bytes_in : int
        Written to the drive and read from it.
    from_memory : int
        Times that a tensor was needed while its bytes were in memory still.
    ahead, awaited, on_demand : int
        Times that bytes were read before they were needed, needed while being read, and needed
        with nothing begun.
    beyond_budget : int
        Bytes read into memory beyond the budget, since autograd held all of it.
    transfer_seconds, stalled_seconds : float
        Time in which at least one transfer was under way, and time in which forward or backward
        waited for one.
    pool : PoolStatistics
    file : SpillStatistics
    """

    tensors: int
    ranges: int
    left: int
    live_bytes: int
    held_bytes: int
    most_held_bytes: int
    bytes_out: int
    bytes_in: int
    from_memory: int
    ahead: int
    awaited: int
    on_demand: int
    beyond_budget: int
    transfer_seconds: float
    stalled_seconds: float
    pool: PoolStatistics
    file: SpillStatistics

    @property
    def hidden_pct(self) -> float:
        """Per cent of the transfers' time that passed behind compute."""
        if self.transfer_seconds <= 0:
            return 100.0
        return 100 * max(0.0, 1 - self.stalled_seconds / self.transfer_seconds)
