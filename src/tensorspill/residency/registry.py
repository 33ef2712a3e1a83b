"""Which residency a parameter belongs to."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tensorspill.residency.residency import Residency

__all__ = ["enter", "leave", "residency_of"]

#: By the parameter's id: its own as long as the residency lives, which keeps the parameter.
_residencies: weakref.WeakValueDictionary[int, Residency] = weakref.WeakValueDictionary()


def residency_of(parameter: torch.Tensor) -> Residency | None:
    """Return the residency that spills a parameter, or None if it stays in memory."""
    return _residencies.get(id(parameter))


def enter(parameters: Iterable[torch.Tensor], residency: Residency) -> None:
    """Note that a residency spills parameters from now on."""
    for parameter in parameters:
        _residencies[id(parameter)] = residency


def leave(parameters: Iterable[torch.Tensor]) -> None:
    """Note that parameters are not spilled any more."""
    for parameter in parameters:
        _residencies.pop(id(parameter), None)
