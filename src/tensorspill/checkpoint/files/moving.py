"""Copying ranges of elements between tensors of any strides and flat staging memory."""

from __future__ import annotations

from typing import TypeGuard

import torch

from tensorspill.checkpoint.files.chunks import Box, Source, element_boxes

__all__ = ["gather", "is_plain", "raw", "scatter"]


def is_plain(tensor: torch.Tensor | Source) -> TypeGuard[torch.Tensor]:
    """Whether a tensor's bytes are its values, in row-major order."""
    return (
        isinstance(tensor, torch.Tensor)
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that can be copied: no kernels are needed for the odd types of one byte."""
    tensor = tensor.detach()
    return tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor


def gather(tensor: torch.Tensor | Source, start: int, out: torch.Tensor) -> None:
    """Copy elements `start` and following of a tensor into `out`, flat and of the same dtype."""
    if isinstance(tensor, Source):
        tensor.fill(start, out)
        return
    tensor, out = raw(tensor), raw(out)
    if tensor.is_contiguous():
        out.copy_(tensor.view(-1)[start : start + out.numel()])
        return
    done = 0
    for box in element_boxes(tensor.shape, start, start + out.numel()):
        out[done : done + box.numel].view(box.lengths).copy_(box.of(tensor))
        done += box.numel


def scatter(
    data: torch.Tensor, start: int, shape: tuple[int, ...], wanted: Box, out: torch.Tensor
) -> None:
    """Copy what is wanted of some elements into a tensor.

    Parameters
    ----------
    data : torch.Tensor
        Flat: elements `start` and following of a row-major tensor of `shape`.
    start : int
    shape : tuple of int
    wanted : Box
        Part of that tensor.
    out : torch.Tensor
        Of shape ``wanted.lengths``; only the elements in `data` are changed.
    """
    data, out = raw(data), raw(out)
    done = 0
    for box in element_boxes(shape, start, start + data.numel()):
        shared = box.intersection(wanted)
        if shared is not None:
            part = data[done : done + box.numel].view(box.lengths)
            shared.relative_to(wanted).of(out).copy_(shared.relative_to(box).of(part))
        done += box.numel
