"""DTensors: which box of the whole a rank holds, and which ranks hold the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tensorspill.checkpoint.distributed.description import Claim, Part
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.errors import UnsupportedError

__all__ = ["part_of"]

_WHY = "DTensor"


def part_of(
    name: str, tensor: DTensor, known: dict[Any, tuple[Box, Claim | None]]
) -> tuple[Part, torch.Tensor] | None:
    """Return the part that this rank holds, and its local tensor; None outside of the mesh.

    The ranks along mesh dimensions on which it is replicated hold the same. The part's dtype is
    left empty.

    Parameters
    ----------
    name : str
    tensor : DTensor
    known : dict
        Remembers what was computed for equal layouts; of the thousands of tensors of a model most
        are alike, and each computation takes long.

    Raises
    ------
    UnsupportedError
        It has a pending reduction, or its local tensor is not of the shape that its placements ask
        for.
    """
    mesh = tensor.device_mesh
    if mesh.get_coordinate() is None:
        return None
    shape, placements = tuple(tensor.shape), tensor.placements
    key = id(mesh), shape, placements
    if key not in known:
        known[key] = _layout(name, shape, mesh, placements)
    box, claim = known[key]
    local = tensor.to_local().detach()
    if tuple(local.shape) != box.lengths:
        raise UnsupportedError(
            f"DTensor {name!r} has a local tensor of shape {tuple(local.shape)}; its placements "
            f"{placements} ask for {box.lengths}"
        )
    return Part(name, "", shape, *box, claim), local


def _layout(
    name: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
) -> tuple[Box, Claim | None]:
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedError(
            f"DTensor {name!r} has a pending reduction ({placements})",
            remedy="Redistribute it first",
        )
    lengths, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = Box(tuple(offsets), tuple(lengths))
    if box.numel == 0:
        # Of an uneven division some ranks get nothing; where that would begin differs by release.
        box = Box((0,) * len(shape), tuple(lengths))
    split = tuple(not isinstance(placement, Replicate) for placement in placements)
    return box, _claim(mesh, split)


def _claim(mesh: DeviceMesh, split: tuple[bool, ...]) -> Claim | None:
    """Return the ranks at this one's coordinates on the mesh dimensions that split a tensor."""
    place = mesh.get_coordinate()
    if place is None or all(split):
        return None
    at = tuple(c if s else slice(None) for c, s in zip(place, split, strict=True))
    ranks = tuple(sorted(mesh.mesh[at].flatten().tolist()))
    return Claim(ranks, _WHY) if len(ranks) > 1 else None
