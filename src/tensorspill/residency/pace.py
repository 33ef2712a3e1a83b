"""How long compute takes and how fast transfers are: how early a fetch has to begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from tensorspill.residency.entry import Spilled

__all__ = ["Coming", "Pace"]

Step = TypeVar("Step", bound=Hashable)

#: A fetch begins this many times earlier than the transfers measured so far would need.
_MARGIN = 4.0
#: And this much earlier in any case, for what else the machine does.
_SLACK = 0.02
#: Of an old measurement in the next estimate.
_MEMORY = 0.5


class Coming(NamedTuple):
    """Parameters that will be needed.

    Attributes
    ----------
    entries : sequence of Spilled
    due : float
        Seconds of compute until then, as far as is known.
    """

    entries: Sequence[Spilled]
    due: float


class Pace(Generic[Step]):
    """Measures compute between uses of parameters, and the rate of transfers.

    Parameters
    ----------
    moved : callable
        Returns the bytes moved so far, and the seconds in which transfers were under way.
    """

    def __init__(self, moved: Callable[[], tuple[int, float]]) -> None:
        self._moved = moved
        self._seconds: dict[Step, float] = {}
        self._latest: Step | None = None
        #: When what was asked for was there; set by whoever brought it.
        self.given = 0.0

    def asked(self, step: Step) -> None:
        """Note that parameters are asked for by `step`: the compute before has ended."""
        if self._latest is not None:
            seconds = time.perf_counter() - self.given
            before = self._seconds.get(self._latest, seconds)
            self._seconds[self._latest] = _MEMORY * before + (1 - _MEMORY) * seconds
        self._latest = step

    def seconds(self, step: Step) -> float:
        """Return how long `step` computes, until the next one asks; 0 if that isn't known."""
        return self._seconds.get(step, 0.0)

    def too_early(self, coming: Coming, nbytes: int) -> bool:
        """Whether it does to fetch `nbytes`, what is under way included, later on."""
        moved, seconds = self._moved()
        if not moved or not seconds:
            return False
        return coming.due > _MARGIN * nbytes * seconds / moved + _SLACK
