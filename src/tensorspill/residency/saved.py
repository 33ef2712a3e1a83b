"""Saved tensors that lie in a parameter's memory, kept as a place in that parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tensorspill.errors import UnsupportedError
from tensorspill.residency.entry import Spilled
from tensorspill.saved_tensors import Saved

__all__ = ["SavedParameter", "SavedPlace", "Unpack", "in_own_memory", "locate", "new_nodes"]

Find = Callable[[int], Spilled | None]


def locate(tensor: torch.Tensor, find: Find) -> Spilled | None:
    """Return the spilled parameter in whose memory a tensor lies."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return None
    # One table does for host and device memory: they share one address space.
    return find(tensor.data_ptr()) if tensor.device.type in ("cpu", "cuda") else None


class SavedPlace(Saved):
    """A tensor that can be made again from a parameter: kept as shape, strides, offset and dtype.

    Parameters
    ----------
    tensor : torch.Tensor
        A view of what `whole` returns.
    entry : Spilled
        The parameter, in memory now.
    offset : int
        Of the view, in elements.
    unpack : callable
        Brings `entry` back and returns `view`, or a copy of it.
    """

    __slots__ = ("_bits", "_offset", "_shape", "_stride", "_unpack", "_version", "dtype", "entry")

    def __init__(self, tensor: torch.Tensor, entry: Spilled, offset: int, unpack: Unpack) -> None:
        self.entry = entry
        self.dtype = tensor.dtype
        self._unpack = unpack
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = offset
        self._bits = (tensor.is_conj(), tensor.is_neg())
        self._version = entry.parameter._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor again.

        Raises
        ------
        UnsupportedError
            The parameter was changed in between.
        """
        if self.entry.parameter._version != self._version:
            raise UnsupportedError(
                f"Parameter {self.entry.name} was changed in place between forward and backward",
                remedy="Update parameters after backward",
            )
        return self._unpack(self)

    def whole(self) -> torch.Tensor:
        """Return what the tensor is a view of, flat, while the parameter is in memory."""
        raise NotImplementedError

    def view(self) -> torch.Tensor:
        """Return the tensor while the parameter is in memory."""
        with torch.no_grad():
            whole = self.whole()
            offset = whole.storage_offset() + self._offset
            view = whole.as_strided(self._shape, self._stride, offset)
            conjugate, negative = self._bits
            view = view.conj() if conjugate else view
            return torch._neg_view(view) if negative else view


Unpack = Callable[[SavedPlace], torch.Tensor]


class SavedParameter(SavedPlace):
    """A view of a parameter's memory.

    Linear's backward, for one, needs ``weight.t()``. Kept as a tensor it would point to memory that
    holds another parameter by then.
    """

    __slots__ = ()

    def __init__(self, tensor: torch.Tensor, entry: Spilled, unpack: Unpack) -> None:
        offset = (tensor.data_ptr() - entry.address) // tensor.element_size()
        super().__init__(tensor, entry, offset, unpack)

    def whole(self) -> torch.Tensor:
        """Return the parameter in the saved tensor's dtype, flat."""
        return self.entry.parameter.detach().view(-1).view(self.dtype)


def in_own_memory(output: Any, find: Find) -> Any:
    """Return a block's output with what lies in the memory of a parameter copied.

    A block that returns, say, a slice of its weight would hand out memory that soon holds something
    else.
    """
    if not any(
        isinstance(leaf, torch.Tensor) and locate(leaf, find) for leaf in tree_leaves(output)
    ):
        return output
    return tree_map_only(
        torch.Tensor, lambda leaf: leaf.clone() if locate(leaf, find) else leaf, output
    )


def new_nodes(output: Any, inputs: Any) -> set[torch.autograd.graph.Node]:
    """Return the autograd nodes with which a block's backward begins.

    Those of inputs that are handed through are not among them.
    """
    known = {leaf.grad_fn for leaf in tree_leaves(inputs) if isinstance(leaf, torch.Tensor)}
    found = {leaf.grad_fn for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
    return {node for node in found - known if node is not None}
