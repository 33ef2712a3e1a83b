"""A small model in every layout that checkpoints are saved from and loaded into."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from tensorspill.checkpoint.distributed.description import describe
from tensorspill.checkpoint.distributed.nested import flatten

WIDTH = 24


def layouts(size: int) -> list[str]:
    """Return the layouts that so many ranks can have."""
    found = ["plain", "ddp", "fsdp", "tp"]
    if size % 2 == 0:
        found.append("hsdp")
    if size == 4:
        found.append("fsdp-tp")
    return found


class Model(nn.Module):
    """Two layers whose widths 1 to 4 ranks can share, and a third that is never sharded by TP."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        found: torch.Tensor = self.out(self.down(torch.relu(self.up(x))))
        return found


def build(layout: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model with equal content in every layout, and its optimizer."""
    size = dist.get_world_size()
    torch.manual_seed(7)
    model: nn.Module = Model()
    if layout == "ddp":
        model = DistributedDataParallel(model)
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    elif layout == "hsdp":
        names = ("replicate", "shard")
        fully_shard(model, mesh=init_device_mesh("cpu", (2, size // 2), mesh_dim_names=names))
    elif layout == "tp":
        _tp(model, init_device_mesh("cpu", (size,)))
    elif layout == "fsdp-tp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        _tp(model, mesh["tp"])
        fully_shard(model, mesh=mesh["dp"])
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def _tp(model: nn.Module, mesh: Any) -> None:
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the state of both, with names that are the same in every layout."""
    parameters, moments = get_state_dict(model, optimizer)
    return {"model": parameters, "optimizer": moments}


def set_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Give both a state."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )


def reference(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return what a tensor of that name holds everywhere."""
    chance = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(shape, generator=chance).to(dtype)


def fill(state: Mapping[str, Any]) -> None:
    """Give every tensor of a state its reference's content, this rank's part of it."""
    for value, expected in _pairs(state):
        value.copy_(expected)


def poison(state: Mapping[str, Any]) -> None:
    """Give every tensor of a state content that it must not keep."""
    for value, _ in _pairs(state):
        value.fill_(float("nan"))


def check(state: Mapping[str, Any], what: str) -> None:
    """Check that every tensor holds its reference's content, to the bit."""
    for number, (value, expected) in enumerate(_pairs(state)):
        assert torch.equal(value, expected), f"{what}: tensor {number}"


def _pairs(state: Mapping[str, Any]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    held = describe(*flatten(state))
    return [
        (value.detach(), part.box.of(reference(part.name, part.shape, value.dtype)))
        for part, value in zip(held.parts, held.values, strict=True)
        if part.dtype
    ]


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """Train on data that is the same for every layout and number of ranks."""
    found = []
    for step in steps:
        chance = torch.Generator().manual_seed(step)
        x = torch.randn(12, WIDTH, generator=chance)
        y = torch.randint(0, 5, (12,), generator=chance)
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = loss.detach()
        found.append(float(value.full_tensor() if isinstance(value, DTensor) else value))
    return found
