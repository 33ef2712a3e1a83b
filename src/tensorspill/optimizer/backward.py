"""Steps in the middle of backward: parameters are updated as soon as their gradients are there."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tensorspill.errors import BrokenError, CapacityError, UnsupportedError
from tensorspill.optimizer.local import is_distributed
from tensorspill.optimizer.planning import Planner
from tensorspill.optimizer.portions import Costs, Member, Portion
from tensorspill.optimizer.visits import hand_over, has_spilled_gradient
from tensorspill.optimizer.wrapped import Group
from tensorspill.residency.accumulation import Accumulation
from tensorspill.residency.spent import SpentGradient

__all__ = ["InBackward"]

log = logging.getLogger(__name__)

Step = Callable[[Portion, Callable[[], None]], None]


class InBackward:
    """Has parameters stepped when autograd has accumulated their gradients.

    Gradients are collected in the order in which they come until they make a portion, which is
    stepped at once; ``parameter.grad`` is a `SpentGradient` from then on. How they come is learnt:
    a parameter's first gradient is left to the optimizer's own step. So are for good those of a
    parameter to which one backward adds several times, as reentrant checkpointing does for shared
    ones, and of one for which there is no room beside what backward holds. What is not stepped in
    backward has its gradient, and the optimizer's step finds it.

    Parameters
    ----------
    planner : Planner
    groups : callable
        Returns the optimizer's groups of now.
    step : callable
        Steps a portion; calls its second argument when that is done, before a Ctrl-C can come.

    Attributes
    ----------
    planned : list of Portion
        The portions of a backward like the last one, in their order.
    made : int
        Portions stepped since the last call of `end`.
    """

    def __init__(self, planner: Planner, groups: Callable[[], list[Group]], step: Step) -> None:
        self._planner = planner
        self._groups = groups
        self._step = step
        self._accumulation = Accumulation(self._before, self._after)
        self._numbers: dict[torch.Tensor, int] = {}
        #: What `planned` was made of: these are stepped in backward.
        self._order: dict[torch.Tensor, None] = {}
        #: Are left to the optimizer's own step for good.
        self._late: set[torch.Tensor] = set()
        self._warned = False
        #: Got a gradient since the last step, in this order.
        self._arrived: dict[torch.Tensor, None] = {}
        #: Will make the next portion; with their gradients, by which it is seen if one was cleared.
        self._ready: dict[torch.Tensor, torch.Tensor] = {}
        self._taken = Costs(0, 0)
        self._target = Costs(0, 0)
        self._ends: set[torch.Tensor] = set()
        self._places: dict[torch.Tensor, int] = {}
        self._place = -1
        self._accumulating = 0
        #: With which a part of each group was stepped.
        self._settings: dict[int, Group] = {}
        self.planned: list[Portion] = []
        self.made = 0

    # -- what the optimizer calls ----------------------------------------------------------------

    def watch(self) -> None:
        """Note new parameters of the groups, and those that are no longer frozen."""
        numbers = {p: n for n, group in enumerate(self._groups()) for p in group["params"]}
        fresh = [p for p in numbers if p.requires_grad and p not in self._numbers]
        self._numbers.update((p, numbers[p]) for p in fresh)
        for parameter in fresh:
            self._accumulation.watch(parameter)

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Return a context in which backward only adds gradients up."""
        self._drop_ready()
        self._accumulating += 1
        try:
            yield
        finally:
            self._accumulating -= 1

    def check_settings(self) -> None:
        """Raise `UnsupportedError` if a step has other settings than its part in backward had."""
        groups = self._groups()
        for number, before in self._settings.items():
            after = groups[number]
            changed = [key for key in before if not _same(before[key], after.get(key))]
            if changed:
                raise UnsupportedError(
                    f"{', '.join(changed)} of group {number} changed between backward and step, "
                    "and parameters were stepped in backward",
                    remedy="Change settings after the step, as learning-rate schedulers do",
                )

    def end(self) -> None:
        """Note that the optimizer's step is made: the next backward belongs to the next one."""
        self.watch()
        if self._late and not self._warned:
            self._warned = True
            log.warning(
                "%d parameters are stepped after backward: there is no room for them in it, or "
                "they get several gradients before a step; if by accumulation, use `accumulating`",
                len(self._late),
            )
        self._learn()
        self._arrived.clear()
        self._settings.clear()
        self._drop_ready()
        self._place, self.made = -1, 0

    def upcoming(self) -> Iterator[Portion]:
        """Yield what will be stepped in backward, from now on and in the next one."""
        yield from self.planned[self._place + 1 :]
        yield from self.planned[: self._place + 1]

    def close(self) -> None:
        """Step nothing any more; what was given up is None."""
        self._accumulation.remove()
        self._order.clear()
        for parameter in self._numbers:
            if isinstance(parameter.grad, SpentGradient):
                parameter.grad = None

    # -- backward ------------------------------------------------------------------------------

    def _before(self, parameter: torch.Tensor) -> None:
        """Look at a gradient to which more is about to be added."""
        gradient = parameter.grad
        if isinstance(gradient, SpentGradient):
            raise UnsupportedError(
                "Backward gives a gradient to a parameter that was stepped in backward, and not "
                "cleared since",
                remedy="Call zero_grad() after each step; where gradients of several backwards are "
                "added up, all but the last belong inside of `accumulating()`",
            )
        if gradient is None and not has_spilled_gradient(parameter):
            self._arrived.pop(parameter, None)
        elif parameter in self._arrived and not self._accumulating:
            self._late.add(parameter)
            self._ready.pop(parameter, None)

    def _after(self, parameter: torch.Tensor) -> None:
        """Take a gradient that is complete."""
        gradient = parameter.grad
        if self._accumulating or gradient is None:
            return
        _check_replicas(parameter)
        self._arrived[parameter] = None
        if not self.takes(parameter) or gradient.requires_grad:  # by create_graph: is used yet
            return
        more = self._planner.costs(self._groups(), self._member(parameter))
        if self._ready and not self._taken.plus(more).within(self._target):
            self._step_ready()
        self._ready[parameter] = gradient
        self._taken = self._taken.plus(more)
        if parameter in self._ends:
            self._step_ready()

    def takes(self, parameter: torch.Tensor) -> bool:
        """Whether a gradient that is complete now is used in backward."""
        return not self._accumulating and parameter in self._order and parameter not in self._late

    def _step_ready(self) -> None:
        parameters = [p for p, gradient in self._ready.items() if p.grad is gradient]
        portion = Portion(tuple(self._member(p) for p in parameters), self._taken.state)
        self._drop_ready()
        if not parameters:
            return
        self._place = self._places[parameters[-1]]
        made = self.made
        try:
            self._step(portion, lambda: self._spend(portion))
        except CapacityError as error:
            if self.made != made or isinstance(error, BrokenError):
                raise
            # Backward holds other parameters; when it is over there may be room for these.
            self._late.update(parameters)

    def _spend(self, portion: Portion) -> None:
        groups = self._groups()
        for number, parameter in portion.members:
            parameter.grad = SpentGradient.of(parameter)
            self._settings[number] = _settings_of(groups[number])
        self.made += 1

    def _drop_ready(self) -> None:
        """Leave to the optimizer's own step what was collected."""
        self._ready.clear()
        self._taken = Costs(0, 0)

    # -- learning --------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Expect gradients in the order of the last time."""
        seen = dict.fromkeys([*self._arrived, *self._order])
        order = {p: None for p in seen if p in self._numbers and p not in self._late}
        if [*map(id, order)] == [*map(id, self._order)]:
            return
        self._order = order
        self.planned = self._planner.portions(self._groups(), map(self._member, order))
        self._target = self._planner.target(order)
        self._ends = {portion.members[-1].parameter for portion in self.planned}
        self._places = {
            p: place for place, portion in enumerate(self.planned) for p in portion.parameters
        }
        hand_over([*order], partial(_ask, weakref.ref(self)))

    def _member(self, parameter: torch.Tensor) -> Member:
        return Member(self._numbers[parameter], parameter)


def _ask(me: weakref.ref[InBackward], parameter: torch.Tensor) -> bool:
    found = me()
    return found is not None and found.takes(parameter)


def _check_replicas(parameter: torch.Tensor) -> None:
    """Raise `UnsupportedError` where others may add to a gradient after backward."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or is_distributed(parameter) or not distributed.is_available():
        return
    if distributed.is_initialized() and distributed.get_world_size() > 1:
        raise UnsupportedError(
            "A step in backward would use a gradient before it is averaged over the processes",
            remedy="Use a SpilledOptimizer without in_backward, or shard the model by FSDP2",
        )


def _settings_of(group: Group) -> Group:
    """Return the settings of a group as they are now."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def _same(before: Any, after: Any) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return torch.equal(before, after)
    return bool(before == after)
