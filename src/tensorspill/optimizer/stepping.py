"""The step of a few parameters, whose state comes to memory for it and goes again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.optimizer.masters import Masters
from tensorspill.optimizer.portions import Portion
from tensorspill.optimizer.state_dicts import MASTER
from tensorspill.optimizer.states import StateTensor, StateTensors
from tensorspill.optimizer.visits import fetch_ahead, visiting
from tensorspill.optimizer.wrapped import Group, Wrapped, same_choice
from tensorspill.residency.pace import Coming
from tensorspill.timeline import span

__all__ = ["Stepper"]


class Stepper:
    """Steps portions, with their state in memory meanwhile.

    Not safe for concurrent use.

    Parameters
    ----------
    wrapped : Wrapped
        Does the computing.
    masters : Masters
    tensors : StateTensors
        Where the state is.
    """

    def __init__(self, wrapped: Wrapped, masters: Masters, tensors: StateTensors) -> None:
        self._wrapped = wrapped
        self._masters = masters
        self._tensors = tensors

    def step(
        self,
        groups: Sequence[Group],
        portion: Portion,
        upcoming: Callable[[], Iterable[Coming]],
        done: Callable[[], None],
        *,
        following: Portion | None = None,
        scaler: Mapping[str, Any] | None = None,
    ) -> None:
        """Update the parameters of a portion, begin to write it and to read what comes next.

        Parameters
        ----------
        groups : sequence of dict
            All groups of the optimizer.
        portion : Portion
        upcoming : callable
            Returns whose state will be needed next, soonest first; asked before the update and
            after it.
        done : callable
            Called when the parameters are updated; no Ctrl-C comes in between.
        following : Portion, optional
            Whose parameters and gradients are needed next, if these visit memory only.
        scaler : mapping, optional
            What `from_scaler` returned.

        Raises
        ------
        CapacityError, SpillError
            State or parameters could not be brought: nothing changed. Or something could not be
            written, after `done`: it stays in memory.
        """
        with visiting(portion.parameters):
            states = self.spilled(portion)
            try:
                self._tensors.acquire(states, upcoming())
                if following is not None:
                    fetch_ahead(following.parameters)
                with HeldInterrupts():
                    self._update(groups, portion, states, done, scaler or {})
            except BaseException:
                # A Ctrl-C may come after they were pinned, and before the update or after it.
                self._tensors.unpin([s for s in states if s.entry.pins], changed=False)
                raise
        self._spill_new(portion)
        self._tensors.memory.tidy(upcoming())

    def _update(
        self,
        groups: Sequence[Group],
        portion: Portion,
        states: Sequence[StateTensor],
        done: Callable[[], None],
        scaler: Mapping[str, Any],
    ) -> None:
        """Update a portion, and let its state go; nothing may interrupt this."""
        finished = False
        try:
            with span("compute", "optimizer"):
                self._compute(groups, portion, scaler)
            done()
            finished = True
        finally:
            self._tensors.unpin(states, changed=finished)

    def make_eager_state(self, groups: Sequence[Group], portion: Portion) -> None:
        """Make and spill what the class has of a portion before its first step."""
        with visiting(portion.parameters):
            self._wrapped.make_state(_groups_of(groups, portion, lambda mine: mine))
        self._spill_new(portion)

    def raw_state(self, parameter: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's state as it is kept; what is away is a placeholder."""
        updated = self._masters.of(parameter)
        if updated is None:
            return {}
        found = dict(self._wrapped.state.get(updated, {}))
        return found if updated is parameter else {**found, MASTER: updated}

    def values(self, parameters: Iterable[torch.Tensor]) -> list[Any]:
        """Return all there is of some parameters' state."""
        return [value for p in parameters for value in self.raw_state(p).values()]

    def spilled(self, portion: Portion) -> list[StateTensor]:
        """Return what a portion has on the drive."""
        return self._tensors.spilled(self.values(portion.parameters))

    def coming(self, portion: Portion) -> Coming:
        """Return what has to be read for a portion."""
        return Coming([state.entry for state in self.spilled(portion)], 0.0)

    @torch.no_grad()
    def _compute(
        self, groups: Sequence[Group], portion: Portion, scaler: Mapping[str, Any]
    ) -> None:
        try:
            self._wrapped.step(_groups_of(groups, portion, self._masters.begin), scaler)
            self._masters.round(portion.parameters)
        finally:
            self._masters.end(portion.parameters)

    def _spill_new(self, portion: Portion) -> None:
        """Write what state has come up, or could not be written before."""
        self._tensors.adopt(self.values(portion.parameters))


def _groups_of(
    groups: Sequence[Group],
    portion: Portion,
    updated: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> list[Group]:
    """Return the groups that a portion has a part in, with that part only."""
    parts = []
    for number, group in enumerate(groups):
        mine = [m.parameter for m in portion.members if m.group == number]
        if mine:
            settings = {k: v for k, v in group.items() if k != "param_names"}
            settings = same_choice(settings, group["params"])
            parts.append({**settings, "params": updated(mine)})
    return parts
