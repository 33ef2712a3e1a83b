"""``state_dict`` and ``load_state_dict`` of modules whose parameters are on the drive."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from tensorspill.errors import UnsupportedError
from tensorspill.residency.entry import Spilled
from tensorspill.residency.guards import Uncopyable

__all__ = ["StateDicts"]

Acquire = Callable[[Sequence[Spilled], bool], None]
Release = Callable[[Sequence[Spilled], bool], None]


class StateDicts(Uncopyable):
    """Brings the parameters of one module after the other while they are saved or loaded.

    Parameters
    ----------
    acquire, release : callable
        Take parameters into memory and give them back; the second argument says whether they are
        changed.
    """

    def __init__(self, acquire: Acquire, release: Release) -> None:
        self._acquire = acquire
        self._release = release
        self._entries: dict[nn.Module, list[Spilled]] = {}
        self._held: list[tuple[nn.Module, bool]] = []
        self._copies: dict[Spilled, weakref.ref[torch.Tensor]] = {}
        self._destination: weakref.ref[Any] | None = None

    def watch(self, module: nn.Module, entries: list[Spilled]) -> list[Any]:
        """Bring `entries`, the own parameters of a module, from now on; return handles."""
        fresh = module not in self._entries
        self._entries[module] = entries
        if not fresh:
            return []
        watched: Any = module  # not all of these methods have types
        return [
            watched.register_state_dict_pre_hook(self._before_saving),
            # Torch marks this hook with an attribute, which a bound method can't have.
            watched.register_state_dict_post_hook(partial(self._after_saving)),
            watched.register_load_state_dict_pre_hook(self._before_loading),
            watched.register_load_state_dict_post_hook(self._after_loading),
        ]

    def settle(self) -> None:
        """Give back what was held when saving or loading failed."""
        while self._held:
            module, changed = self._held.pop()
            self._release(self._entries[module], changed)

    def _before_saving(self, module: nn.Module, _: str, keep_vars: bool) -> None:
        if keep_vars:
            raise UnsupportedError("Parameters in the spill file can't be saved with keep_vars")
        self._take(module, False)

    def _after_saving(self, module: nn.Module, state: Any, prefix: str, _: Any) -> None:
        if self._destination is None or self._destination() is not state:
            self._destination, self._copies = weakref.ref(state), {}
        for name, parameter in module.named_parameters(recurse=False):
            entry = next((e for e in self._entries[module] if e.parameter is parameter), None)
            if entry is not None and prefix + name in state:
                state[prefix + name] = self._copy(entry)
        self._give_back(module)

    def _copy(self, entry: Spilled) -> torch.Tensor:
        """Return a copy in ordinary memory: the same one wherever a parameter is shared."""
        known = self._copies.get(entry)
        copy = None if known is None else known()
        if copy is None:
            copy = entry.parameter.detach().clone()
            self._copies[entry] = weakref.ref(copy)
        return copy

    def _before_loading(self, module: nn.Module, _: Any, __: str, metadata: Any, *___: Any) -> None:
        if metadata.get("assign_to_params_buffers"):
            raise UnsupportedError("Parameters in the spill file can't be loaded with assign=True")
        self._take(module, True)

    def _after_loading(self, module: nn.Module, _: Any) -> None:
        self._give_back(module)

    def _take(self, module: nn.Module, changing: bool) -> None:
        self._acquire(self._entries[module], changing)
        self._held.append((module, changing))

    def _give_back(self, module: nn.Module) -> None:
        while self._held:
            held, changed = self._held.pop()
            self._release(self._entries[held], changed)
            if held is module:
                return
