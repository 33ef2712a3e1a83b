"""What a residency did, as a frozen record, and what a model needs to get by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from tensorspill.residency.entry import cost

__all__ = ["Footprint", "ResidencyStatistics", "footprint", "spillable"]


@dataclass(frozen=True, slots=True)
class ResidencyStatistics:
    """What a `Residency` did since it was made.

    Attributes
    ----------
    blocks, parameters : int
        How many blocks, and how many distinct parameters of theirs are spilled.
    spilled_bytes : int
        Bytes of these parameters.
    outside_bytes : int
        Bytes of the model's other parameters, which stay in memory.
    resident_bytes, peak_bytes : int
        Bytes of parameters in memory, `outside_bytes` included, padding of buffers included: now,
        and the most there were at once.
    budget_bytes : int
        The limit for `peak_bytes`: `outside_bytes` and the swapper's budget.
    pinned_bytes : int
        Bytes of the pool that a block in use keeps from being let go now.
    visits : int
        How often a block was used.
    awaited, on_demand : int
        Of these, how often it was still being read, and how often nothing had been started.
    ahead : int
        Reads that were started before the block was used.
    evictions : int
        How often a parameter was let go.
    bytes_in, bytes_out : int
        Bytes of parameters read from and written to the drive, from when they were spilled first.
    transfer_seconds : float
        Time in which at least one transfer was under way.
    stalled_seconds : float
        Time in which compute waited for a transfer.
    gradients_in, gradients_out : int
        Bytes of packed gradients read and written, while they are spilled.
    """

    blocks: int
    parameters: int
    spilled_bytes: int
    outside_bytes: int
    resident_bytes: int
    peak_bytes: int
    budget_bytes: int
    pinned_bytes: int
    visits: int
    awaited: int
    on_demand: int
    ahead: int
    evictions: int
    bytes_in: int
    bytes_out: int
    transfer_seconds: float
    stalled_seconds: float
    gradients_in: int = 0
    gradients_out: int = 0

    @property
    def hidden_pct(self) -> float:
        """Per cent of the transfers' time that passed behind compute."""
        if self.transfer_seconds <= 0:
            return 100.0
        return 100 * max(0.0, 1 - self.stalled_seconds / self.transfer_seconds)

    @property
    def gbps(self) -> float:
        """GB/s (decimal) while transfers were under way, both directions together."""
        if self.transfer_seconds <= 0:
            return 0.0
        moved = self.bytes_in + self.bytes_out + self.gradients_in + self.gradients_out
        return moved / self.transfer_seconds / 1e9


@dataclass(frozen=True, slots=True)
class Footprint:
    """Parameter bytes of a model, and the budgets with which its blocks can be spilled.

    Attributes
    ----------
    total_bytes : int
        All parameters, each counted once.
    outside_bytes : int
        Those that stay in memory: outside of blocks, shared with something outside, or too small.
    smallest_budget : int
        Holds `outside_bytes` and any one block.
    prefetch_budget : int
        Holds `outside_bytes` and any two blocks that follow one another, so that one can be read
        while the other computes.
    """

    total_bytes: int
    outside_bytes: int
    smallest_budget: int
    prefetch_budget: int


def spillable(
    model: nn.Module, blocks: Iterable[nn.Module], swappable: Callable[[nn.Parameter], bool]
) -> dict[nn.Parameter, None]:
    """Return the parameters of `blocks` that can live in the spill file, in order.

    Left out are those that a module outside of all blocks uses too, and those that `swappable`
    refuses.
    """
    inside = {module for block in blocks for module in block.modules()}
    outside = {p for m in model.modules() if m not in inside for p in m.parameters(recurse=False)}
    return {
        parameter: None
        for block in blocks
        for parameter in block.parameters()
        if parameter not in outside and parameter.numel() and swappable(parameter)
    }


def footprint(
    model: nn.Module, blocks: Iterable[nn.Module], swappable: Callable[[nn.Parameter], bool]
) -> Footprint:
    """Return what spilling `blocks` of `model` takes; the model may be on the meta device.

    Parameters
    ----------
    model : torch.nn.Module
        With all its parameters.
    blocks : iterable of torch.nn.Module
        In the order in which they are used.
    swappable : callable
        Whether a parameter may be spilled; see `ParameterSwapper.swappable`.
    """
    blocks = list(blocks)
    spilled = spillable(model, blocks, swappable)
    groups = [{p for p in block.parameters() if p in spilled} for block in blocks]
    pairs = [left | right for left, right in pairwise(groups)]
    total = sum(parameter.nbytes for parameter in model.parameters())
    outside = total - sum(parameter.nbytes for parameter in spilled)
    one = max((sum(map(cost, group)) for group in groups), default=0)
    two = max((sum(map(cost, group)) for group in pairs), default=one)
    return Footprint(total, outside, outside + one, outside + two)
