"""What the tests of spilled optimizers share: models, training, and one check of all invariants."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from tensorspill.optimizer import SpilledOptimizer
from tensorspill.pool import BufferPool, ExtentAllocator
from tensorspill.residency.entry import State
from tensorspill.swap.swapper import ParameterSwapper
from tests.swap.helpers import check_swapper


class Scattering(ExtentAllocator):
    """Puts extents into random holes, at either end."""

    def __init__(self, capacity: int, seed: int):
        super().__init__(capacity)
        self.random = random.Random(seed)

    def _choose(self, holes, size):
        fitting = [index for index in range(len(holes)) if holes.sizes[index] >= size]
        if not fitting:
            return None
        index = self.random.choice(fitting)
        start, end = int(holes.starts[index]), int(holes.starts[index] + holes.sizes[index])
        return index, self.random.choice((start, end - size))


class Scattered(SpilledOptimizer):
    """Its memory is handed out at random places, and poisoned whenever it is free."""

    scattered: BufferPool

    def _open_swapper(self, folder, pool_bytes, **options):
        allocator = Scattering(pool_bytes, 5)
        self.scattered = BufferPool(pool_bytes, page_lock="no", allocator=allocator, poison=True)
        return ParameterSwapper(folder, None, pool=self.scattered, **options)

    def close(self):
        super().close()
        self.scattered.close()


@contextmanager
def spilled(
    cls: type[torch.optim.Optimizer], params: Any, folder: Any, **options: Any
) -> Iterator[SpilledOptimizer]:
    """Open a spilled optimizer of little memory, and check in the end that all is in order."""
    options = {"min_bytes": 0, "budget": "2MiB", **options}
    with Scattered(cls, params, folder=folder, **options) as optimizer:
        yield optimizer
        check(optimizer)


def check(optimizer: SpilledOptimizer) -> None:
    """Check that nothing is pinned, lost or over the budget."""
    tensors = optimizer.state_tensors
    assert not any(state.entry.pins for state in tensors)
    known = {state.entry for state in tensors}
    assert set(tensors.store.held) <= known
    assert tensors.store.held_bytes == sum(entry.nbytes for entry in tensors.store.held)
    assert all(e.state is not State.AWAY for e in tensors.store.held)
    assert tensors.store.peak_bytes <= tensors.swapper.budget <= optimizer.statistics().budget_bytes
    check_swapper(tensors.swapper)


def same_parameters(ours: Iterable[torch.Tensor], theirs: Iterable[torch.Tensor]) -> None:
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        assert bits(mine).equal(bits(other)), f"parameter {number}"


def same_state(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Check that two optimizers have the same state and settings, to the last bit."""
    mine, other = ours.state_dict(), theirs.state_dict()
    assert mine["param_groups"] == other["param_groups"]
    assert mine["state"].keys() == other["state"].keys()
    for number, state in other["state"].items():
        assert mine["state"][number].keys() == state.keys()
        for key, value in state.items():
            found = mine["state"][number][key]
            if isinstance(value, torch.Tensor):
                assert found.dtype == value.dtype
                assert found.shape == value.shape
                assert found.stride() == value.stride()
                assert bits(found).equal(bits(value)), f"{key} of parameter {number}"
            else:
                assert found == value


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes, so that NaN and -0 count as what they are."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def model(seed: int = 0) -> nn.Sequential:
    """Return a small model with parameters of many sizes, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(8 * 36, 64),
        nn.LayerNorm(64),
        nn.Linear(64, 20),
        nn.Linear(20, 20, bias=False),
    )


def backward(module: nn.Module, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    loss: torch.Tensor = module(torch.randn(4, 3, 6, 6, generator=generator)).square().mean()
    loss.backward()
    return loss.detach()


def train(
    module: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int]
) -> list[torch.Tensor]:
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(backward(module, step))
        optimizer.step()
    return losses


def settings(name: str) -> dict[str, Any]:
    """Return settings with which an optimizer has all the state that it can have."""
    more: dict[str, dict[str, Any]] = {
        "ASGD": {"t0": 1},
        "Adam": {"amsgrad": True, "weight_decay": 0.1},
        "AdamW": {"weight_decay": 0.1},
        "Adagrad": {"initial_accumulator_value": 0.5, "lr_decay": 0.1},
        "Muon": {"lr": 0.01},
        "NAdam": {"decoupled_weight_decay": True, "weight_decay": 0.1},
        "RMSprop": {"momentum": 0.9, "centered": True},
        "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    }
    return more.get(name, {})


def fresh_like(tensor: torch.Tensor, seed: int) -> torch.Tensor:
    """Return random values of a tensor's form, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
    return values.to(tensor.dtype)
