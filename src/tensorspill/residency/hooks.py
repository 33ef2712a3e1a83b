"""The hooks on a model's blocks: parameters in memory before forward and backward, gone after."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorspill import saved_tensors, timeline
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.residency.copies import Copies
from tensorspill.residency.entry import Spilled
from tensorspill.residency.guards import Uncopyable
from tensorspill.residency.saved import (
    SavedParameter,
    SavedPlace,
    in_own_memory,
    locate,
    new_nodes,
)
from tensorspill.residency.schedule import Phase, Schedule
from tensorspill.residency.state import StateDicts
from tensorspill.residency.visits import Backward, Block, Visit, in_backward
from tensorspill.saved_tensors import HandlerHooks

__all__ = ["BlockHooks"]


class _Call:
    """A forward under way: what has to be undone when it ends."""

    __slots__ = ("computing", "held", "hooks", "visit")

    def __init__(self, visit: Visit) -> None:
        self.visit = visit
        self.held = False
        self.hooks: HandlerHooks | None = None
        self.computing: AbstractContextManager[None] | None = None


class BlockHooks(Uncopyable):
    """Brings the parameters of blocks for forward and backward.

    Forward: the pre-hook takes them, the hook gives them back, also after an exception. What
    autograd saves meanwhile and lies in their memory is kept as a `SavedParameter`, and what
    autocast made of them as a `SavedCopy`.

    Backward: a block is entered when the gradient of an output is complete, or when a saved
    parameter of it is needed, whichever comes first; `Backward` knows when it is left.

    Parameters
    ----------
    schedule : Schedule
        Takes and gives back parameters.
    find : callable
        Returns what is spilled of a parameter, or None.
    lock : threading.RLock
        Held while anything changes.
    """

    def __init__(
        self,
        schedule: Schedule,
        find: Callable[[torch.Tensor], Spilled | None],
        lock: threading.RLock,
    ) -> None:
        self._schedule = schedule
        self._lock = lock
        self._backward = Backward(
            self._enter_backward, schedule.unpin, self._tidy_after_backward, lock
        )
        self._computing: AbstractContextManager[None] | None = None
        self._copies = Copies(find)
        self._states = StateDicts(self._take, self._give_back)
        self._serials = itertools.count()
        self._local = threading.local()
        self._handles: list[Any] = []
        self._model: nn.Module | None = None

    def watch_model(self, model: nn.Module) -> None:
        """Clean up, when `model` is called, after a call that Ctrl-C ended."""
        self._model = model
        self._handles.append(model.register_forward_pre_hook(self._begin, prepend=True))

    def watch_block(self, block: Block, module: nn.Module) -> None:
        """Bring the parameters of `block` from now on, also to save and to load them."""
        watched: Any = module
        before, after = partial(self._before, block), partial(self._after, block)
        self._handles += [
            watched.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            watched.register_forward_hook(after, always_call=True, with_kwargs=True),
        ]

    def watch_state(self, module: nn.Module, entries: list[Spilled]) -> None:
        """Bring the parameters that a module itself has, to save and to load them."""
        self._handles += self._states.watch(module, entries)

    def remove(self) -> None:
        """Remove all hooks from the modules."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def settle(self) -> None:
        """Unpin what a backward, or a save, that failed has left behind."""
        self._backward.unpin_what_is_over()
        if not self._calls:
            self._states.settle()

    # -- forward -------------------------------------------------------------------------------

    @property
    def _calls(self) -> list[_Call]:
        """The calls under way in this thread, outermost first."""
        if not hasattr(self._local, "calls"):
            self._local.calls = []
        calls: list[_Call] = self._local.calls
        return calls

    def _begin(self, model: nn.Module, _: Any) -> None:
        if not (self._calls and self._calls[0].visit.block.module is model):
            self._drop_interrupted()

    def _drop_interrupted(self) -> None:
        """End what a KeyboardInterrupt has ended; `always_call` hooks run for an Exception only."""
        with self._lock:
            while self._calls:
                self._end_innermost(interrupted=True)
            self._states.settle()

    def _before(self, block: Block, module: nn.Module, *_: Any) -> None:
        if module is self._model:
            self._drop_interrupted()
        with self._lock:
            self._backward.leave_what_is_over()
            call = _Call(Visit(next(self._serials), block, block.entries))
            self._calls.append(call)
            phase = Phase.RECOMPUTE if in_backward() else Phase.FORWARD
            if phase is Phase.RECOMPUTE:
                self._backward.leave_others(block)
            self._schedule.acquire(block.entries, (phase, block))
            with HeldInterrupts():
                call.held = True
                hooks = saved_tensors.hooks(self)
                hooks.__enter__()
                call.hooks = hooks
            self._copies.refill(block.entries)
            call.computing = _computing("forward", block)

    def _after(self, block: Block, _: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        calls = self._calls
        if not calls or calls[-1].visit.block is not block:
            return None  # a pre-hook that runs before ours failed
        with self._lock:
            try:
                output = in_own_memory(output, self._schedule.find)
                for node in new_nodes(output, (args, kwargs)):
                    node.register_prehook(partial(self._reached, calls[-1].visit))
            finally:
                self._end_innermost()
        return output

    def _end_innermost(self, *, interrupted: bool = False) -> None:
        with HeldInterrupts():
            call = self._calls.pop()
            hooks, call.hooks = call.hooks, None
            if hooks is not None and interrupted:
                hooks.abandon()
            elif hooks is not None:
                hooks.__exit__()
            if call.computing is not None:
                call.computing.__exit__(None, None, None)
            held, call.held = call.held, False
            if held:
                self._schedule.unpin(call.visit.entries)
        if held:
            self._copies.empty(call.visit.entries)
            self._schedule.tidy()

    # -- backward ------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> SavedPlace | None:
        """Keep what lies in a parameter's memory as a place in it (see `saved_tensors.Handler`)."""
        visit = self._calls[-1].visit
        unpack = partial(self._unpack, visit)
        entry = locate(tensor, self._schedule.find)
        if entry is not None:
            return SavedParameter(tensor, entry, unpack)
        return self._copies.recognise(tensor, visit.block.entries, unpack)

    def _unpack(self, visit: Visit, saved: SavedPlace) -> torch.Tensor:
        with self._lock:
            if in_backward():
                self._enter(visit)
                self._backward.hold(visit, saved.entry)
                # With create_graph, what is unpacked here is saved once more, and not through us.
                return saved.view().clone() if torch.is_grad_enabled() else saved.view()
            self._schedule.acquire([saved.entry])
            try:
                return saved.view().clone()
            finally:
                self._schedule.unpin([saved.entry])
                self._schedule.tidy()

    def _reached(self, visit: Visit, *_: Any) -> None:
        with self._lock:
            self._enter(visit)

    def _enter(self, visit: Visit) -> None:
        self._backward.enter(visit)
        if self._computing is None:
            self._computing = _computing("backward", visit.block)

    def _enter_backward(self, visit: Visit) -> None:
        self._end_computing()
        self._schedule.acquire(visit.entries, (Phase.BACKWARD, visit.block))

    def _tidy_after_backward(self) -> None:
        self._end_computing()
        self._schedule.tidy()

    def _end_computing(self) -> None:
        computing, self._computing = self._computing, None
        if computing is not None:
            computing.__exit__(None, None, None)

    # -- saving and loading ----------------------------------------------------------------------

    def _take(self, entries: Sequence[Spilled], changing: bool) -> None:
        with self._lock:
            self._schedule.acquire(entries, changing=changing)

    def _give_back(self, entries: Sequence[Spilled], changed: bool) -> None:
        with self._lock:
            self._schedule.unpin(entries, changed=changed)
            self._schedule.tidy()


def _computing(what: str, block: Block) -> AbstractContextManager[None]:
    span = timeline.span("compute", f"{what} {block.name}")
    span.__enter__()
    return span
