"""What is used now, and what is therefore fetched ahead."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Sequence

from tensorspill.errors import BrokenError, CapacityError
from tensorspill.residency.entry import Spilled
from tensorspill.residency.memory import ResidentMemory
from tensorspill.residency.order import Order
from tensorspill.residency.pace import Coming
from tensorspill.residency.visits import Block

__all__ = ["Phase", "Schedule", "Step"]

_LOOK_AHEAD = 4


class Phase(enum.Enum):
    """What a block is visited for."""

    FORWARD = enum.auto()
    RECOMPUTE = enum.auto()
    BACKWARD = enum.auto()
    UPDATE = enum.auto()
    READ = enum.auto()


Step = tuple[Phase, Block]


class Schedule:
    """Takes parameters into memory for the one who needs them, and looks ahead.

    Parameters
    ----------
    memory : ResidentMemory
        Does it.
    blocks : list of Block
        In the order of forward; may grow.
    """

    def __init__(self, memory: ResidentMemory, blocks: list[Block]) -> None:
        self._memory = memory
        self._blocks = blocks
        self._order: Order[Step] = Order(self._guess)
        self._latest: Step | None = None
        self._pace = memory.pace
        self._hints: list[tuple[Spilled, ...]] = []
        self.find = memory.store.find

    def acquire(
        self,
        entries: Sequence[Spilled],
        step: Step | None = None,
        *,
        changing: bool = False,
    ) -> None:
        """Pin parameters in memory, and start to fetch what comes next.

        Parameters
        ----------
        entries : sequence of Spilled
            What is needed.
        step : (Phase, Block), optional
            Which step of the training this is, if it is one.
        changing : bool
            They will be changed.

        Raises
        ------
        CapacityError
            They don't fit beside what is in use; says what would.
        SpillError
            A read failed, or an earlier write.
        """
        if step is not None:
            self._order.visited(step)
            self._latest = step
            self._pace.asked(step)
        self._hints = [hint for hint in self._hints if set(hint).isdisjoint(entries)]
        try:
            self._memory.acquire(entries, self._upcoming(), changing=changing)
        except BrokenError:
            raise
        except CapacityError as error:
            raise self._too_small(entries, error) from error

    def unpin(self, entries: Iterable[Spilled], *, changed: bool = False) -> None:
        """Take back what `acquire` did; see `ResidentMemory.unpin`."""
        self._memory.unpin(entries, changed=changed)

    def tidy(self) -> None:
        """Write what changed, let go what is not needed soon, fetch what is."""
        self._memory.tidy(self._upcoming())

    def fetch_ahead(self, entries: Sequence[Spilled]) -> None:
        """Take for granted that these are needed next, after what was announced before."""
        if entries and tuple(entries) not in self._hints:
            self._hints.append(tuple(entries))
        self._memory.look_ahead(self._upcoming())

    def _upcoming(self) -> Iterator[Coming]:
        for hint in self._hints:
            yield Coming(hint, 0.0)
        due = self._pace.seconds(self._latest) if self._latest is not None else 0.0
        for step in self._order.upcoming(_LOOK_AHEAD * len(self._blocks)):
            yield Coming(step[1].entries, due)
            due += self._pace.seconds(step)

    def _guess(self, step: Step) -> Step | None:
        """Return what follows a step in plain training."""
        phase, block = step
        if block.number < 0:
            return None
        first, last = self._blocks[0], self._blocks[-1]
        if phase is Phase.BACKWARD or phase is Phase.RECOMPUTE:
            before = self._blocks[block.number - 1] if block is not first else None
            return (Phase.BACKWARD, before) if before else (Phase.UPDATE, first)
        if block is not last:
            return phase, self._blocks[block.number + 1]
        if phase is Phase.FORWARD:
            return Phase.BACKWARD, block
        return (Phase.FORWARD, first) if phase is Phase.UPDATE else None

    def _too_small(self, entries: Iterable[Spilled], error: CapacityError) -> CapacityError:
        asked = sum(entry.nbytes for entry in entries)
        used = self._memory.pinned_bytes(besides=entries)
        enough = self._memory.store.outside_bytes + asked + used
        return CapacityError(
            f"The budget has no room for these parameters beside {used} bytes in use",
            asked=asked,
            free=error.free,
            largest=error.largest,
            remedy=f"This takes a budget of {enough} bytes at least",
        )
