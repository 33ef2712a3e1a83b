"""The part of a tensor that this process holds: of a distributed tensor, its shard."""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["is_distributed", "local_part", "shard_like"]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a `torch.distributed.tensor.DTensor`."""
    # Who has one has imported this, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself, or the shard of a distributed one: the very tensor in it."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        shard: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return shard


def shard_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a value that is whole, if `parameter` is sharded."""
    if not is_distributed(parameter) or is_distributed(value) or value.shape != parameter.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    like: Any = parameter
    # Every process has the whole value: nothing is sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
