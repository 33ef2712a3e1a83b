"""What a spilled optimizer did, as a frozen record."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.swap.status import SwapperStatistics

__all__ = ["OptimizerStatistics"]


@dataclass(frozen=True, slots=True)
class OptimizerStatistics:
    """What a `SpilledOptimizer` did since it was made.

    Attributes
    ----------
    steps : int
        Steps that were finished.
    portions : int
        Groups of parameters of which the last step was made.
    tensors : int
        State tensors on the drive.
    state_bytes : int
        Their bytes, master weights included.
    memory_bytes : int
        Bytes of state that stays in memory, being small.
    resident_bytes, peak_bytes : int
        Bytes of state tensors in the pool: now, and the most there were at once.
    budget_bytes : int
        The limit for `peak_bytes` and what a portion makes meanwhile.
    bytes_in, bytes_out : int
        Bytes of state read from and written to the drive, from when they were spilled first.
    transfer_seconds : float
        Time in which at least one transfer was under way.
    stalled_seconds : float
        Time in which the step waited for a transfer.
    swapper : SwapperStatistics
        Of the pool and the spill file.
    """

    steps: int
    portions: int
    tensors: int
    state_bytes: int
    memory_bytes: int
    resident_bytes: int
    peak_bytes: int
    budget_bytes: int
    bytes_in: int
    bytes_out: int
    transfer_seconds: float
    stalled_seconds: float
    swapper: SwapperStatistics

    @property
    def hidden_pct(self) -> float:
        """Per cent of the transfers' time that passed behind compute."""
        if self.transfer_seconds <= 0:
            return 100.0
        return 100 * max(0.0, 1 - self.stalled_seconds / self.transfer_seconds)
