"""How large the portions are, and what of the budget is the pool's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from tensorspill.errors import CapacityError, UnsupportedError
from tensorspill.optimizer.local import local_part
from tensorspill.optimizer.masters import Masters
from tensorspill.optimizer.portions import Costs, Member, Portion, portions_of, target_bytes
from tensorspill.optimizer.visits import visit_bytes, visit_limit
from tensorspill.optimizer.wrapped import Group, Layout, Wrapped
from tensorspill.pool.sizes import round_down, round_up

__all__ = ["Planner", "common_device"]

_UNIT = 4096


class Planner:
    """Knows what each parameter's state takes, before there is any.

    Parameters
    ----------
    wrapped : Wrapped
    masters : Masters
    budget : int
        Bytes for the pool, and for what a portion makes in its step beside it: new state, and
        gradients in the masters' dtype.
    min_bytes : int
        Smaller state tensors stay in memory.
    """

    def __init__(self, wrapped: Wrapped, masters: Masters, budget: int, min_bytes: int) -> None:
        self.budget = budget
        self._wrapped = wrapped
        self._masters = masters
        self._min_bytes = min_bytes
        self._layouts: dict[tuple[int, torch.dtype, int], Layout] = {}
        self._costs: dict[torch.Tensor, int] = {}

    def portions(self, groups: Sequence[Group], members: Iterable[Member]) -> list[Portion]:
        """Return the portions in which some of the parameters of `groups` are stepped."""
        listed = list(members)
        target = self.target(member.parameter for member in listed)
        return portions_of(listed, lambda member: self.costs(groups, member), target)

    def target(self, parameters: Iterable[torch.Tensor]) -> Costs:
        """Return how large the portions of some parameters should be at most."""
        return Costs(target_bytes(self.budget), visit_limit(parameters))

    def costs(self, groups: Sequence[Group], member: Member) -> Costs:
        """Return what a parameter takes in memory while it is stepped."""
        return Costs(self.cost(groups, member), visit_bytes(member.parameter))

    def cost(self, groups: Sequence[Group], member: Member) -> int:
        """Return the bytes that a parameter's state takes in the pool."""
        parameter = member.parameter
        if parameter not in self._costs:
            self._costs[parameter] = self._measured(groups[member.group], member)
        return self._costs[parameter]

    def forget(self, parameters: Iterable[torch.Tensor]) -> None:
        """Measure these anew the next time."""
        for parameter in parameters:
            self._costs.pop(parameter, None)

    def pool_bytes(self, groups: Sequence[Group]) -> int:
        """Return what of the budget is the pool's.

        Raises
        ------
        CapacityError
            The budget is too small for the largest parameter; says the smallest that works.
        """
        members = [Member(i, p) for i, group in enumerate(groups) for p in group["params"]]
        largest = max((p.nbytes for p in self.portions(groups, members)), default=0)
        self.check(largest, self.budget // 2)
        return max(round_down(self.budget - largest, _UNIT), _UNIT)

    def check(self, largest: int, room: int) -> None:
        """Raise `CapacityError` if state of `largest` bytes has no room."""
        if largest > room:
            raise CapacityError(
                "The budget is too small for the state of the largest parameter",
                asked=2 * largest,
                free=self.budget,
                largest=self.budget,
                remedy=f"The smallest that works is {2 * largest} bytes; transfers hide behind "
                f"compute from {4 * largest} on",
            )

    def _measured(self, group: Group, member: Member) -> int:
        parameter = member.parameter
        shape = local_part(parameter.detach()).shape
        updated = self._like_updated(parameter)
        key = (member.group, updated.dtype, parameter.ndim)
        if key not in self._layouts:
            self._layouts[key] = self._wrapped.layout(group, updated)
        sizes = [
            size * math.prod(n for n, like in zip(shape, long, strict=True) if like)
            for size, long in self._layouts[key]
        ]
        if self._masters.wanted(parameter):
            sizes.append(shape.numel() * updated.element_size())
        return sum(round_up(size, _UNIT) for size in sizes if size >= self._min_bytes)

    def _like_updated(self, parameter: torch.Tensor) -> torch.Tensor:
        dtype = self._masters.dtype if self._masters.wanted(parameter) else parameter.dtype
        return torch.empty((0,) * parameter.ndim, dtype=dtype, device=parameter.device)


def common_device(groups: Iterable[Group]) -> torch.device:
    """Return the device of all parameters.

    Raises
    ------
    UnsupportedError
        They are on several.
    """
    devices = {p.device for group in groups for p in group["params"]}
    if len(devices) > 1:
        names: Any = ", ".join(sorted(map(str, devices)))
        raise UnsupportedError(
            f"The parameters are on several devices: {names}",
            remedy="Use a spilled optimizer for each",
        )
    return devices.pop() if devices else torch.device("cpu")
