"""Which saved tensors are worth a place on the drive, and which bytes of them."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Span", "belongs_to_a_parameter", "fills_its_memory", "span_of"]


class Span(NamedTuple):
    """Bytes of a tensor's memory, counted from its storage's first."""

    begin: int
    nbytes: int


def span_of(tensor: torch.Tensor, device: torch.device) -> Span | None:
    """Return the bytes between a tensor's first and last, or None if it can't be spilled."""
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
        return None
    if tensor.device != device or not tensor.numel():
        return None
    size = tensor.element_size()
    if tensor.is_contiguous():
        return Span(int(tensor.storage_offset()) * size, tensor.nbytes)
    reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    return Span(int(tensor.storage_offset()) * size, (reach + 1) * size)


def fills_its_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor, or what it is a view of, is all that there is in its memory.

    Else there may be others in it whose changes in place this one's version doesn't show, such as
    the parts that a recurrent layer's gates are computed in.
    """
    whole = tensor if tensor._base is None else tensor._base
    return whole.numel() * whole.element_size() == whole.untyped_storage().nbytes()


def belongs_to_a_parameter(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a parameter, a view of one, or autocast's copy of one.

    These stay in memory anyway: the copies as long as the autocast context, which is where
    forward is.
    """
    whole = tensor if tensor._base is None else tensor._base
    if whole.is_leaf:
        return whole.requires_grad
    node = whole.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return False
    before = node.next_functions[0][0]
    return before is not None and hasattr(before, "variable")
