"""Tensors saved for backward: one owner for the hooks that decide how they are kept.

Of nested `torch.autograd.graph.saved_tensors_hooks` only the innermost runs. Whoever pushes a pair
therefore disables those outside, activation checkpointing among them. So everything in this library
that has an opinion about saved tensors is a `Handler`, and `hooks` pushes one pair for all of them:
it asks each handler in turn and leaves what nobody wants to the pair that was innermost before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

__all__ = ["Handler", "HandlerHooks", "Saved", "foreign_pair", "hooks"]

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Saved(ABC):
    """What a handler keeps in place of a tensor."""

    __slots__ = ()

    @abstractmethod
    def unpack(self) -> torch.Tensor:
        """Return the tensor, at once usable; called when backward needs it, perhaps repeatedly."""


class Handler(Protocol):
    """Decides how some of the tensors that autograd saves are kept."""

    def pack(self, tensor: torch.Tensor) -> Saved | None:
        """Return what to keep in place of `tensor`, or None to leave it to others."""


class _Chain:
    """The handlers in force, innermost first, and the foreign pair outside of them.

    Those in `_last` take whatever is left, and so come after all others.
    """

    __slots__ = ("_first", "_last", "outer")

    def __init__(
        self, first: tuple[Handler, ...], last: tuple[Handler, ...], outer: Pair | None
    ) -> None:
        self._first = first
        self._last = last
        self.outer = outer

    def with_handler(self, handler: Handler, last: bool) -> _Chain:
        if handler in self._first or handler in self._last:
            return self
        if last:
            return _Chain(self._first, (handler, *self._last), self.outer)
        return _Chain((handler, *self._first), self._last, self.outer)

    def pack(self, tensor: torch.Tensor) -> Any:
        for handler in (*self._first, *self._last):
            saved = handler.pack(tensor)
            if saved is not None:
                return saved
        return tensor if self.outer is None else self.outer[0](tensor)

    def unpack(self, saved: Any) -> torch.Tensor:
        if isinstance(saved, Saved):
            return saved.unpack()
        if self.outer is None:
            assert isinstance(saved, torch.Tensor)  # `pack` kept it as it was
            return saved
        return self.outer[1](saved)


class HandlerHooks(saved_tensors_hooks):
    """A context in which a handler is asked; made by `hooks`."""

    def __init__(self, chain: _Chain) -> None:
        super().__init__(chain.pack, chain.unpack)
        self._chain = chain

    def abandon(self) -> None:
        """Undo `__enter__` where a Ctrl-C has kept `__exit__` from being called in its turn.

        Contexts outside, which did end, have then taken our pair from the top of the stack in place
        of theirs, which is still there; or torch has restored the whole stack.
        """
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if top is not None and top in ((self.pack_hook, self.unpack_hook), self._chain.outer):
            self.__exit__()


def hooks(handler: Handler, *, last: bool = False) -> HandlerHooks:
    """Return a context manager in which `handler` is asked first about every saved tensor.

    If `last`, it is asked after those who are not, also those whose contexts are inside: for
    handlers that take any tensor, and not only what they know to be theirs.

    Handlers that are in force already stay so, and so does a foreign pair, such as the one of
    `torch.utils.checkpoint`: it gets the tensors that no handler wants. A foreign pair pushed
    inside of the context wins there, as torch has it.
    """
    chain = _current()
    return HandlerHooks(chain.with_handler(handler, last))


def foreign_pair() -> Pair | None:
    """Return the innermost pair of hooks that is not this module's, if it is in force still."""
    return _current().outer


def _current() -> _Chain:
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    chain = getattr(outer[0], "__self__", None) if outer is not None else None
    return chain if isinstance(chain, _Chain) else _Chain((), (), outer)
