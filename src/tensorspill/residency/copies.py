"""Copies of parameters in a lower precision, as autocast makes and keeps them until backward."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from tensorspill.residency.entry import Spilled
from tensorspill.residency.saved import SavedPlace, Unpack

__all__ = ["Copies", "SavedCopy"]


class SavedCopy(SavedPlace):
    """A view of a parameter's copy in another dtype, made again from the parameter.

    Parameters
    ----------
    tensor : torch.Tensor
        The view, or the copy itself.
    copy : torch.Tensor
        Contiguous, of the parameter's shape.
    entry : Spilled
        The parameter, in memory now.
    unpack : callable
        As for `SavedParameter`.
    """

    __slots__ = ()

    def __init__(
        self, tensor: torch.Tensor, copy: torch.Tensor, entry: Spilled, unpack: Unpack
    ) -> None:
        offset = int(tensor.storage_offset()) - int(copy.storage_offset())
        super().__init__(tensor, entry, offset, unpack)

    def whole(self) -> torch.Tensor:
        """Return the copy, flat."""
        return self.entry.parameter.detach().to(self.dtype).view(-1)


class Copies:
    """Recognises copies, and lets those that autocast caches take no memory between uses.

    Autocast keeps one copy of each weight until its context ends, so that all uses share it (and
    their gradients are summed in its dtype). It has to stay the same tensor therefore; its memory
    is given up when the block that uses it ends, and made anew when it begins again.

    Parameters
    ----------
    find : callable
        Returns what is spilled of a parameter, or None.
    """

    def __init__(self, find: Callable[[torch.Tensor], Spilled | None]) -> None:
        self._find = find
        self._made: dict[Spilled, dict[torch.dtype, TensorWeakRef]] = {}
        self._emptied: set[Spilled] = set()

    def recognise(
        self, tensor: torch.Tensor, block: Iterable[Spilled], unpack: Unpack
    ) -> SavedCopy | None:
        """Return what to keep in place of a copy of a parameter, or of a view of one."""
        if not tensor.is_floating_point() or tensor.dtype.itemsize > 2:
            return None
        copy = tensor if tensor._base is None else tensor._base
        if not copy.is_contiguous():
            return None
        entry = self._source(copy) if copy.grad_fn is not None else _frozen(copy, block)
        if entry is None:
            return None
        if copy.grad_fn is not None:
            self._made.setdefault(entry, {})[copy.dtype] = TensorWeakRef(copy)
        return SavedCopy(tensor, copy, entry, unpack)

    def empty(self, entries: Iterable[Spilled]) -> None:
        """Give up the memory of copies of parameters that nobody uses now."""
        for entry in entries:
            if entry in self._made and not entry.pins:
                for copy in self._living(entry):
                    copy.data = torch.full((), torch.nan, dtype=copy.dtype).expand(copy.shape)
                    self._emptied.add(entry)

    def refill(self, entries: Iterable[Spilled]) -> None:
        """Make the copies of parameters that are in memory again."""
        for entry in entries:
            if entry in self._emptied:
                self._emptied.discard(entry)
                for copy in self._living(entry):
                    copy.data = entry.parameter.detach().to(copy.dtype)

    def _living(self, entry: Spilled) -> list[torch.Tensor]:
        copies = [reference() for reference in self._made[entry].values()]
        living = [copy for copy in copies if copy is not None]
        if not living:
            del self._made[entry]
        return living

    def _source(self, copy: torch.Tensor) -> Spilled | None:
        """Return the parameter that a tensor was cast from, by the graph."""
        node: Any = copy.grad_fn
        if node.name() != "ToCopyBackward0":
            return None
        parameter = getattr(node.next_functions[0][0], "variable", None)
        entry = None if parameter is None else self._find(parameter)
        return entry if entry is not None and _alike(entry.parameter, copy) else None


def _frozen(copy: torch.Tensor, block: Iterable[Spilled]) -> Spilled | None:
    """Return the frozen parameter of a block that a tensor was cast from, by its content."""
    if copy.requires_grad:
        return None
    for entry in block:
        parameter = entry.parameter
        if parameter.requires_grad or copy.dim() < 2 or not _alike(parameter, copy):
            continue
        if torch.equal(parameter.detach().to(copy.dtype), copy):
            return entry
    return None


def _alike(parameter: torch.Tensor, copy: torch.Tensor) -> bool:
    return parameter.shape == copy.shape and parameter.device == copy.device
