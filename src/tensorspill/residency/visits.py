"""Visits: when forward and backward are in a block, and when they have left it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.residency.entry import Spilled

__all__ = ["Backward", "Block", "Visit", "in_backward"]


@dataclass(eq=False, slots=True)
class Block:
    """Parameters that are fetched and let go together.

    Attributes
    ----------
    number : int
        Its place among the blocks; -1 for a group that is only updated together.
    module : torch.nn.Module or None
        What computes with them.
    entries : list of Spilled
        Its parameters, of those that are spilled.
    name : str
        In the model.
    """

    number: int
    module: nn.Module | None
    entries: list[Spilled] = field(default_factory=list)
    name: str = ""


@dataclass(eq=False, slots=True)
class Visit:
    """One call of a block; `serial` grows from call to call.

    `entries` are the parameters that its backward needs, `node` is the one of autograd's that used
    some of them last.
    """

    serial: int
    block: Block
    entries: list[Spilled]
    node: Any = None


def _running_node() -> Any:
    """Return the node that autograd runs in this thread."""
    return torch._C._current_autograd_node()


def in_backward() -> bool:
    """Whether autograd is running backward in this thread."""
    return torch._C._current_graph_task_id() != -1


class Backward:
    """The visits that backward is in, each of which holds its parameters.

    Autograd runs what was recorded last first. So as soon as it comes to a visit, it is through
    with every later one of the same graph: that is when those are left, without having to know
    which gradients are missing still, and also where a block is called several times, is frozen in
    part, or shares parameters.

    Parameters
    ----------
    acquire, unpin : callable
        Take and give back the parameters of a visit.
    tidy : callable
        Called when some were given back.
    lock : threading.RLock
        Held by whoever calls a method.
    """

    def __init__(
        self,
        acquire: Callable[[Visit], None],
        unpin: Callable[[Sequence[Spilled]], None],
        tidy: Callable[[], None],
        lock: AbstractContextManager[Any],
    ) -> None:
        self._acquire = acquire
        self._unpin = unpin
        self._tidy = tidy
        self._lock = lock
        self._open: dict[Visit, int] = {}
        self._passes: set[int] = set()
        self._latest: Visit | None = None

    def enter(self, visit: Visit) -> None:
        """Note that backward is in `visit`: what is over is left, and `visit` is held."""
        if visit is self._latest:
            return
        self.leave_what_is_over(visit)
        if visit not in self._open:
            current = self._watch_end()
            self._acquire(visit)
            self._open[visit] = current
        self._latest = visit

    def hold(self, visit: Visit, entry: Spilled) -> None:
        """Hold one more parameter, of another block, for a visit that was entered."""
        visit.node = _running_node()
        if entry not in visit.entries:
            self._acquire(Visit(visit.serial, visit.block, [entry]))
            visit.entries = [*visit.entries, entry]

    def leave_what_is_over(self, now: Visit | None = None) -> None:
        """Leave the visits that backward can't be in any more, given that it is in `now`.

        A pass that failed doesn't say so; its visits are over when no pass, or the one that
        encloses it, is running.
        """
        if self.unpin_what_is_over(now):
            self._tidy()

    def unpin_what_is_over(self, now: Visit | None = None) -> bool:
        """Do the part of this that can't fail; return whether anything was left."""
        current = torch._C._current_graph_task_id()
        if current == -1:
            self._passes.clear()
        return self._leave(
            [
                visit
                for visit, begun in self._open.items()
                if (begun > current if begun != current else now and visit.serial > now.serial)
            ]
        )

    def leave_others(self, block: Block) -> None:
        """Leave what is open beside `block`, which is about to be computed once more.

        Nothing but the node that runs now still uses what was unpacked; backward enters a visit
        anew if it isn't through with it.
        """
        current, node = torch._C._current_graph_task_id(), _running_node()
        self._leave(
            [
                visit
                for visit, begun in self._open.items()
                if begun == current and visit.block is not block and visit.node is not node
            ]
        )

    def _watch_end(self) -> int:
        """Learn when the pass that is running ends; return its number."""
        current = torch._C._current_graph_task_id()
        if current not in self._passes:
            self._passes.add(current)
            Variable._execution_engine.queue_callback(lambda: self._end(current))
        return current

    def _end(self, ended: int) -> None:
        with self._lock:
            self._passes.discard(ended)
            if self._leave([visit for visit, begun in self._open.items() if begun == ended]):
                self._tidy()

    def _leave(self, visits: Sequence[Visit]) -> bool:
        with HeldInterrupts():
            for visit in visits:
                del self._open[visit]
                visit.node = None  # which refers to the visit in turn
                self._unpin(visit.entries)
                self._latest = None
        return bool(visits)
