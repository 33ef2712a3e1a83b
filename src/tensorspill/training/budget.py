"""How a memory budget is divided."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from tensorspill.errors import CapacityError
from tensorspill.pool.sizes import round_down
from tensorspill.residency import footprint
from tensorspill.residency.entry import BUFFER_ALIGNMENT, cost
from tensorspill.residency.statistics import spillable
from tensorspill.training.blocks import find_blocks
from tensorspill.training.options import Swappable, check_options

__all__ = ["Division", "divide", "smallest_budget"]

#: A block should leave room for another one, so that it can be read meanwhile.
_BLOCKS_IN_BUDGET = 2
#: Of the budget, for spilled gradients.
_PART_FOR_GRADIENTS = 4


@dataclass(frozen=True, slots=True)
class Division:
    """What goes where.

    Attributes
    ----------
    blocks : tuple of torch.nn.Module
        That are fetched and let go as a whole.
    outside : int
        Bytes of parameters that stay in memory.
    parameters, gradients : int
        Bytes of memory for spilled parameters, and for spilled gradients.
    """

    blocks: tuple[nn.Module, ...]
    outside: int
    parameters: int
    gradients: int


def divide(
    model: nn.Module,
    resident: int,
    blocks: Sequence[nn.Module] | None,
    swappable: Swappable,
    spill_gradients: bool,
) -> Division:
    """Divide `resident` bytes for a model.

    Parameters
    ----------
    model : torch.nn.Module
        With all its parameters, of which the values may be away.
    blocks : sequence of torch.nn.Module, optional
        Found by `find_blocks` if not given.

    Raises
    ------
    CapacityError
        The budget is too small; says the smallest that works.
    """
    candidates = [
        _Candidate(model, found, swappable, spill_gradients)
        for found in ([list(blocks)] if blocks is not None else _found(model, swappable))
    ]
    fitting = [candidate for candidate in candidates if candidate.smallest <= resident]
    if not fitting:
        best = min(candidates, key=lambda candidate: candidate.smallest)
        raise CapacityError(
            "The budget is too small for the largest block",
            asked=best.smallest,
            free=resident,
            largest=resident,
            remedy=f"The smallest that works is {best.smallest} bytes, of which {best.outside} "
            "are for parameters that stay in memory",
        )
    roomy = [candidate for candidate in fitting if candidate.leaves_room(resident)]
    return (roomy or fitting)[0].division(resident)


def smallest_budget(
    model: nn.Module,
    *,
    blocks: Sequence[nn.Module] | None = None,
    gradients: str = "memory",
    min_bytes: int | str = "64KiB",
) -> int:
    """Return the smallest `resident` with which a model can be offloaded; see `offload`.

    Parameters
    ----------
    model : torch.nn.Module
        May be on the meta device.
    """
    options = check_options("", 0, blocks=blocks, gradients=gradients, min_bytes=min_bytes)
    ways = [list(blocks)] if blocks is not None else _found(model, options.swappable)
    spilling = options.gradients == "spilled"
    return min(_Candidate(model, way, options.swappable, spilling).smallest for way in ways)


class _Candidate:
    """Some blocks, and what they need."""

    def __init__(
        self,
        model: nn.Module,
        blocks: list[nn.Module],
        swappable: Swappable,
        spill_gradients: bool,
    ) -> None:
        sizes = footprint(model, blocks, swappable)
        self.blocks = blocks
        self.outside = sizes.outside_bytes
        self.block = sizes.smallest_budget - sizes.outside_bytes
        largest = max(map(cost, spillable(model, blocks, swappable)), default=0)
        self.gradient = largest if spill_gradients else 0

    @property
    def smallest(self) -> int:
        """The smallest budget that works."""
        return self.outside + self.block + self.gradient

    def leaves_room(self, resident: int) -> bool:
        """Whether one block can be read while another computes, and two gradients be there."""
        needed = _BLOCKS_IN_BUDGET * self.block + 2 * self.gradient
        return bool(self.blocks) and self.outside + needed <= resident

    def division(self, resident: int) -> Division:
        """Divide a budget that is large enough."""
        room = resident - self.outside
        gradients = 0
        if self.gradient:
            share = max(2 * self.gradient, room // _PART_FOR_GRADIENTS)
            gradients = round_down(min(share, room - self.block), BUFFER_ALIGNMENT)
        parameters = round_down(room - gradients, BUFFER_ALIGNMENT)
        return Division(tuple(self.blocks), self.outside, parameters, gradients)


def _found(model: nn.Module, swappable: Swappable) -> list[list[nn.Module]]:
    """Return the ways to divide a model into blocks, that with the largest blocks first."""
    sizes = {sum(cost(p) for p in m.parameters() if swappable(p)) for m in model.modules()}
    ways: dict[tuple[nn.Module, ...], None] = {}
    for limit in sorted(sizes | {0}, reverse=True):
        ways[tuple(find_blocks(model, limit, swappable))] = None
    return [list(way) for way in ways]
