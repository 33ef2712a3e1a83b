"""In which order blocks are visited: learnt from what followed the last time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Order"]

Step = TypeVar("Step", bound=Hashable)

_CONTEXT = 3
_MOST_CONTEXTS = 1 << 16


class Order(Generic[Step]):
    """Predicts the next steps of a process that repeats itself.

    For each run of up to three steps it remembers which step came next the last time, so it needs
    no marks where a pass begins, follows a change of order within one pass, and costs the same
    however long the process runs. A wrong prediction costs time, never correctness.

    Parameters
    ----------
    guess : callable
        Given a step that was never followed by anything, returns the likely next one, or None.
    """

    def __init__(self, guess: Callable[[Step], Step | None]) -> None:
        self._guess = guess
        self._recent: tuple[Step, ...] = ()
        self._next: dict[tuple[Step, ...], Step] = {}

    def visited(self, step: Step) -> None:
        """Record that `step` was taken."""
        if len(self._next) >= _MOST_CONTEXTS:
            self._next.clear()
        for start in range(len(self._recent)):
            self._next[self._recent[start:]] = step
        self._recent = (*self._recent, step)[-_CONTEXT:]

    def upcoming(self, most: int) -> Iterator[Step]:
        """Yield up to `most` steps that are expected next, soonest first."""
        return islice(self._predictions(), most)

    def _predictions(self) -> Iterator[Step]:
        recent = self._recent
        while recent:
            step = self._after(recent)
            if step is None:
                return
            yield step
            recent = (*recent, step)[-_CONTEXT:]

    def _after(self, recent: tuple[Step, ...]) -> Step | None:
        for start in range(len(recent)):
            step = self._next.get(recent[start:])
            if step is not None:
                return step
        return self._guess(recent[-1])
