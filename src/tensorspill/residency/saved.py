"""Saved tensors that lie in a parameter's memory, kept as a place in that parameter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tensorspill.residency.entry import Spilled
from tensorspill.saved_tensors import Saved

__all__ = ["SavedParameter", "in_own_memory", "locate", "new_nodes"]

Find = Callable[[int], Spilled | None]


def locate(tensor: torch.Tensor, find: Find) -> Spilled | None:
    """Return the spilled parameter in whose memory a tensor lies."""
    if tensor.layout is not torch.strided or not tensor.is_cpu or not tensor.numel():
        return None
    return find(tensor.data_ptr())


class SavedParameter(Saved):
    """A view of a parameter, kept as shape, strides, offset and dtype.

    Linear's backward, for one, needs ``weight.t()``. Kept as a tensor it would point to memory that
    holds another parameter by then.

    Parameters
    ----------
    tensor : torch.Tensor
        Lies in the memory of `entry`.
    entry : Spilled
        The parameter, in memory now.
    unpack : callable
        Brings `entry` back and returns `view`, or a copy of it.
    """

    __slots__ = ("_bits", "_dtype", "_offset", "_shape", "_stride", "_unpack", "entry")

    def __init__(
        self,
        tensor: torch.Tensor,
        entry: Spilled,
        unpack: Callable[[SavedParameter], torch.Tensor],
    ) -> None:
        self.entry = entry
        self._unpack = unpack
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = (tensor.data_ptr() - entry.address) // tensor.element_size()
        self._bits = (tensor.is_conj(), tensor.is_neg())

    def unpack(self) -> torch.Tensor:
        """Return the view again, with the parameter's value of now."""
        return self._unpack(self)

    def view(self) -> torch.Tensor:
        """Return the view while the parameter is in memory."""
        with torch.no_grad():
            whole = self.entry.parameter.detach().view(-1).view(self._dtype)
            offset = whole.storage_offset() + self._offset
            view = whole.as_strided(self._shape, self._stride, offset)
            conjugate, negative = self._bits
            view = view.conj() if conjugate else view
            return torch._neg_view(view) if negative else view


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
