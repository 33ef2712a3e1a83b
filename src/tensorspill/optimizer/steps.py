"""Going through the portions of a step: which are left, and which come next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from tensorspill.errors import SpillError
from tensorspill.optimizer.backward import InBackward
from tensorspill.optimizer.planning import Planner
from tensorspill.optimizer.portions import Member, Portion
from tensorspill.optimizer.states import StateTensors
from tensorspill.optimizer.stepping import Stepper
from tensorspill.optimizer.visits import offloaded
from tensorspill.optimizer.wrapped import Group
from tensorspill.residency.pace import Coming
from tensorspill.residency.spent import SpentGradient

__all__ = ["Steps"]


class Steps:
    """Makes steps portion by portion, and remembers what one that failed has left out.

    Not safe for concurrent use.

    Parameters
    ----------
    planner : Planner
    stepper : Stepper
    tensors : StateTensors
    groups : callable
        Returns the optimizer's groups of now.
    in_backward : InBackward or None
        Makes a part of each step before it is called for.

    Attributes
    ----------
    unfinished : list of Portion
        What is left of the step at hand.
    finished : int
        Steps that were made.
    portions : int
        In the last step.
    """

    def __init__(
        self,
        planner: Planner,
        stepper: Stepper,
        tensors: StateTensors,
        groups: Callable[[], list[Group]],
        in_backward: InBackward | None,
    ) -> None:
        self._planner = planner
        self._stepper = stepper
        self._tensors = tensors
        self._groups = groups
        self._planned: list[Portion] = []
        self._backwards = True
        self._in_backward = in_backward
        self.unfinished: list[Portion] = []
        self.finished = self.portions = 0

    def begin(self) -> None:
        """Begin the step of all parameters that have a gradient; `finish` makes it.

        Raises
        ------
        UnsupportedError
            What was made of it in backward had other settings.
        """
        made = 0
        if self._in_backward is not None:
            self._in_backward.check_settings()
            made = self._in_backward.made
            self._in_backward.end()
        groups = self._groups()
        members = [
            Member(number, parameter)
            for number, group in enumerate(groups)
            for parameter in group["params"]
            if parameter.grad is not None and not isinstance(parameter.grad, SpentGradient)
        ]
        self._planned = self._planner.portions(groups, members)
        # Back the way the last one came: what is in memory since then needs no reading.
        self._backwards = not (self._backwards or self._in_backward or self._offloaded())
        self.unfinished = self._planned[::-1] if self._backwards else list(self._planned)
        self.portions = made + len(self._planned)
        if made and not self._planned:
            self.finished += 1
            with self._settling():
                self._tensors.memory.tidy(self._upcoming())

    def finish(self, scaler: Mapping[str, Any]) -> None:
        """Do what is left of a step.

        Parameters
        ----------
        scaler : mapping
            What `from_scaler` returned.

        Raises
        ------
        SpillError
            A portion could not be brought or written; that one, if its parameters were not updated,
            and those after it are left.
        """
        with self._settling():
            while self.unfinished:
                self._step_next(scaler)

    def step_early(self, portion: Portion, done: Callable[[], None]) -> None:
        """Step a portion in the middle of backward; raises what `finish` does."""
        with self._settling():
            self._stepper.step(self._groups(), portion, self._upcoming, done)

    def _step_next(self, scaler: Mapping[str, Any]) -> None:
        portion, *rest = self.unfinished

        def done() -> None:
            del self.unfinished[0]
            self.finished += not self.unfinished

        self._stepper.step(
            self._groups(),
            portion,
            lambda: self._upcoming(portion),
            done,
            following=rest[0] if rest else None,
            scaler=scaler,
        )

    def _upcoming(self, besides: Portion | None = None) -> Iterator[Coming]:
        """Yield what will be needed next, in this step and in the one after it."""
        rest = [portion for portion in self.unfinished if portion is not besides]
        yield from map(self._stepper.coming, rest)
        # Not while there is less memory than this step still needs, had it any state yet.
        if sum(portion.nbytes for portion in rest) >= self._tensors.swapper.budget:
            return
        if self._in_backward is not None:
            following = self._in_backward.upcoming()
        elif self._backwards or self._offloaded():
            following = iter(self._planned)
        else:
            following = reversed(self._planned)
        yield from map(self._stepper.coming, following)

    @contextmanager
    def _settling(self) -> Iterator[None]:
        """Return a context after which, if a drive failed in it, nothing is under way."""
        try:
            yield
        except SpillError:
            self._tensors.settle()
            raise

    def _offloaded(self) -> bool:
        parameters: Iterator[torch.Tensor] = (p for g in self._groups() for p in g["params"])
        return offloaded(parameters)
