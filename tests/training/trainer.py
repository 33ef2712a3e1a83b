"""Training a model group by group, whether it is offloaded or not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from tensorspill.residency import residency_of
from tests.residency.models import batches, loss_of

__all__ = ["Trainer", "check_equal", "make", "train"]


class Trainer:
    """One AdamW for each parameter, which may be spilled, and so may its gradient."""

    def __init__(self, model: nn.Module, autocast: bool = False) -> None:
        self.model = model
        self.autocast = autocast
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW([p], lr=0.01) for p in self.parameters]

    def step(self, text: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = loss_of(self.model, text)
        loss.backward()
        self.update()
        return loss.item()

    def update(self) -> None:
        for parameter, optimizer in zip(self.parameters, self.optimizers, strict=True):
            residency = residency_of(parameter)
            with ExitStack() as stack:
                if residency is not None:
                    stack.enter_context(residency.updating_parameters([parameter]))
                    if residency.gradients is not None:
                        stack.enter_context(residency.gradients.bringing([parameter]))
                optimizer.step()
                parameter.grad = None


def train(model: nn.Module, steps: int, autocast: bool = False) -> list[float]:
    trainer = Trainer(model, autocast)
    return [trainer.step(text) for text in batches(steps)]


def make(kind: Callable[[], Any], seed: int = 0) -> tuple[Any, Any]:
    """Return two equal models."""
    torch.manual_seed(seed)
    model = kind()
    return model, copy.deepcopy(model)


def check_equal(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs), name
        assert (ours.grad is None) == (theirs.grad is None), name
        if ours.grad is not None and theirs.grad is not None:
            assert torch.equal(ours.grad, theirs.grad), name
