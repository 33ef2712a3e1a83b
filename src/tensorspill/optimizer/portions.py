"""Which parameters are stepped together, by the bytes of their state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

__all__ = ["Costs", "Member", "Portion", "portions_of", "target_bytes"]

#: So many portions fit into the budget: one is computed, the others are read or written.
PER_BUDGET = 16
LARGEST_TARGET = 64 << 20


class Member(NamedTuple):
    """A parameter, and which of the optimizer's groups it is in."""

    group: int
    parameter: torch.Tensor


class Costs(NamedTuple):
    """Bytes of memory: of state, and of an offloaded model's parameters that visit."""

    state: int
    visit: int

    def plus(self, more: Costs) -> Costs:
        """Return what both take together."""
        return Costs(self.state + more.state, self.visit + more.visit)

    def within(self, target: Costs) -> bool:
        """Whether none of it is more than in `target`."""
        return self.state <= target.state and self.visit <= target.visit


@dataclass(frozen=True, slots=True, eq=False)
class Portion:
    """Parameters that are stepped together.

    Attributes
    ----------
    members : tuple of Member
        In the optimizer's order.
    nbytes : int
        What their state takes in memory.
    """

    members: tuple[Member, ...]
    nbytes: int

    @property
    def parameters(self) -> list[torch.Tensor]:
        """The parameters alone."""
        return [member.parameter for member in self.members]


def target_bytes(budget: int) -> int:
    """Return how many bytes of state a portion should have."""
    return min(budget // PER_BUDGET, LARGEST_TARGET)


def portions_of(
    members: Iterable[Member], costs: Callable[[Member], Costs], target: Costs
) -> list[Portion]:
    """Cut a list of parameters into portions.

    Parameters
    ----------
    members : iterable of Member
    costs : callable
        What a parameter takes in memory while it is stepped.
    target : Costs
        A portion is closed before any of it gets larger than this; one parameter may be.
    """
    portions: list[Portion] = []
    taken: list[Member] = []
    sums = Costs(0, 0)
    for member in members:
        more = costs(member)
        grown = sums.plus(more)
        if taken and not grown.within(target):
            portions.append(Portion(tuple(taken), sums.state))
            taken, grown = [], more
        taken.append(member)
        sums = grown
    if taken:
        portions.append(Portion(tuple(taken), sums.state))
    return portions
