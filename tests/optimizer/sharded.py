"""Run by torchrun: FSDP2's sharded parameters, their state spilled by each rank."""

from __future__ import annotations

import copy
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tensorspill import checkpoint
from tensorspill.errors import UnsupportedError
from tensorspill.optimizer import SpilledOptimizer
from tensorspill.residency.spent import SpentGradient
from tests.optimizer.helpers import check, same_parameters, spilled

Optimizers = tuple[SpilledOptimizer, torch.optim.Optimizer]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for options in ({}, {"foreach": True}):
        compare(mesh, f"{folder}/a", torch.optim.AdamW, options)
    compare(mesh, f"{folder}/a", torch.optim.AdamW, {}, in_backward=True)
    refuse_replicas(f"{folder}/a")
    compare(mesh, f"{folder}/a", torch.optim.SGD, {"momentum": 0.9, "lr": 0.1})
    resume(mesh, folder)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("ranks agree\n")


def sharded(mesh: Any, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(33, 65), nn.GELU(), nn.LayerNorm(65), nn.Linear(65, 7))
    for layer in model:
        if not isinstance(layer, nn.GELU):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        optimizer.zero_grad()
        model(torch.randn(5, 33, generator=generator)).square().mean().backward()
        optimizer.step()


def shards(tensors: Any) -> list[torch.Tensor]:
    return [t.to_local() if isinstance(t, DTensor) else t for t in tensors]


def same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    mine, other = ours.state_dict()["state"], theirs.state_dict()["state"]
    assert mine.keys() == other.keys()
    for number, state in other.items():
        for key, value in state.items():
            found = mine[number][key]
            assert type(found) is type(value)
            if isinstance(value, DTensor):
                assert found.placements == value.placements
                assert found.shape == value.shape
            same_parameters(shards([found]), shards([value]))


def compare(
    mesh: Any, folder: str, cls: Any, options: dict[str, Any], *, in_backward: bool = False
) -> None:
    ours, theirs = sharded(mesh), sharded(mesh)
    reference = cls(theirs.parameters(), **options)
    more = {"budget": "128KiB", "in_backward": in_backward}
    with spilled(cls, ours.parameters(), folder, **more, **options) as optimizer:
        train(ours, optimizer, range(3))
        spent = [isinstance(p.grad, SpentGradient) for p in ours.parameters()]
        assert set(spent) == {in_backward}
        train(theirs, reference, range(3))
        same_parameters(shards(ours.parameters()), shards(theirs.parameters()))
        same(optimizer, reference)
        assert optimizer.statistics().tensors > 0
        named = get_optimizer_state_dict(ours, optimizer)
        expected = get_optimizer_state_dict(theirs, reference)
        assert set(named["state"]) == set(expected["state"])
        fresh = cls(theirs.parameters(), **options)
        fresh.load_state_dict(optimizer.state_dict())
        same(optimizer, fresh)
        optimizer.load_state_dict(copy.copy(reference.state_dict()))
        train(ours, optimizer, range(3, 5))
        train(theirs, fresh, range(3, 5))
        same_parameters(shards(ours.parameters()), shards(theirs.parameters()))
        check(optimizer)


def refuse_replicas(folder: str) -> None:
    """Gradients that DDP would average later must not be used in backward."""
    model = nn.Linear(33, 65)
    with (
        spilled(torch.optim.AdamW, model.parameters(), folder, in_backward=True),
        pytest.raises(UnsupportedError, match="averaged"),
    ):
        model(torch.randn(5, 33)).sum().backward()


def resume(mesh: Any, folder: str) -> None:
    """Save to a checkpoint and load from it, with state that is sharded and on drives."""
    ours, resumed = sharded(mesh), sharded(mesh, seed=1)
    options = {"budget": "128KiB", "lr": 0.01}
    cls = torch.optim.AdamW
    with (
        spilled(cls, ours.parameters(), f"{folder}/a", **options) as first,
        spilled(cls, resumed.parameters(), f"{folder}/b", **options) as second,
    ):
        train(ours, first, range(3))
        checkpoint.save({"model": ours, "optimizer": first}, f"{folder}/checkpoints")
        checkpoint.load({"model": resumed, "optimizer": second}, f"{folder}/checkpoints")
        same(second, first)
        train(ours, first, range(3, 5))
        train(resumed, second, range(3, 5))
        same_parameters(shards(ours.parameters()), shards(resumed.parameters()))


if __name__ == "__main__":
    main(sys.argv[1])
