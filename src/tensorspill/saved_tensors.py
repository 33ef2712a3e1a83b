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

__all__ = ["Handler", "HandlerHooks", "Saved", "hooks"]

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
    """The handlers in force, innermost first, and the foreign pair outside of them."""

    __slots__ = ("_handlers", "outer")

    def __init__(self, handlers: tuple[Handler, ...], outer: Pair | None) -> None:
        self._handlers = handlers
        self.outer = outer

    def with_handler(self, handler: Handler) -> _Chain:
        if handler in self._handlers:
            return self
        return _Chain((handler, *self._handlers), self.outer)

    def pack(self, tensor: torch.Tensor) -> Any:
        for handler in self._handlers:
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


def hooks(handler: Handler) -> HandlerHooks:
    """Return a context manager in which `handler` is asked first about every saved tensor.

    Handlers that are in force already stay so, and so does a foreign pair, such as the one of
    `torch.utils.checkpoint`: it gets the tensors that no handler wants. A foreign pair pushed
    inside of the context wins there, as torch has it.
    """
    outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
    chain = getattr(outer[0], "__self__", None) if outer is not None else None
    if isinstance(chain, _Chain):
        return HandlerHooks(chain.with_handler(handler))
    return HandlerHooks(_Chain((handler,), outer))
