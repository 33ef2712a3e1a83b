"""Training the demonstration's model; where its parameters are makes no difference here."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tensorspill.demo.corpus import Corpus
from tensorspill.demo.model import GPT, Shape

__all__ = ["Recipe", "Run", "Stepped", "digest", "train", "train_in_memory"]

#: Called after each step with its number, from 1, and its loss.
Stepped = Callable[[int, float], None]

#: Scales the gradients of parameters down to a norm.
Clip = Callable[[Iterable[torch.Tensor], float], Any]


@dataclass(frozen=True, slots=True)
class Recipe:
    """What both runs have in common.

    Attributes
    ----------
    shape : Shape
        Of the model.
    steps : int
        How many.
    batch : int
        Pieces of text in a step.
    rate : float
        Of learning, reached after `warm_up` steps.
    norm : float
        Gradients that are larger all together are scaled down to this.
    seed : int
        Of the model and the batches.
    """

    shape: Shape = field(default_factory=Shape)
    steps: int = 24
    batch: int = 8
    rate: float = 1e-3
    warm_up: int = 8
    norm: float = 1.0
    seed: int = 0

    @property
    def optimizer(self) -> dict[str, Any]:
        """Settings of AdamW."""
        return {"lr": self.rate, "betas": (0.9, 0.95), "fused": True}


@dataclass(frozen=True, slots=True)
class Run:
    """What came out of a training.

    Attributes
    ----------
    losses : tuple of float
        One for each step.
    seconds : float
        All steps took.
    """

    losses: tuple[float, ...]
    seconds: float


def train_in_memory(
    recipe: Recipe, corpus: Corpus, stepped: Stepped, limit: float = math.inf
) -> tuple[Run, str]:
    """Train with everything in memory; return the run and the digest of the parameters."""
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.shape)
    optimizer = torch.optim.AdamW(model.parameters(), **recipe.optimizer)
    run = train(model, optimizer, recipe, corpus, stepped, limit=limit)
    return run, digest(model, model.state_dict())


def train(
    model: GPT,
    optimizer: torch.optim.Optimizer,
    recipe: Recipe,
    corpus: Corpus,
    stepped: Stepped,
    clip: Clip = nn.utils.clip_grad_norm_,
    step: Callable[[], AbstractContextManager[None]] = nullcontext,
    limit: float = math.inf,
) -> Run:
    """Train a model.

    Parameters
    ----------
    model : GPT
        Freshly made with the recipe's seed.
    optimizer : torch.optim.Optimizer
        Of its parameters.
    recipe, corpus, stepped
        What to do, with what, and whom to tell.
    clip : callable
        Scales gradients down to a norm.
    step : callable
        Makes the context of each step.
    limit : float
        Seconds after which no further step is begun.
    """
    batches = corpus.batches(recipe.steps, recipe.batch, recipe.shape.context, recipe.seed)
    losses: list[float] = []
    begun = time.perf_counter()
    for inputs, targets in batches:
        with step():
            logits = model(inputs)
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            torch.autograd.backward(loss)
            clip(model.parameters(), recipe.norm)
            optimizer.param_groups[0]["lr"] = recipe.rate * min(
                1.0, (len(losses) + 1) / recipe.warm_up
            )
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        stepped(len(losses), losses[-1])
        if time.perf_counter() - begun > limit:
            break
    return Run(tuple(losses), time.perf_counter() - begun)


def digest(model: GPT, state: Mapping[str, torch.Tensor]) -> str:
    """Return a digest of all parameters; `state` has their values, also one by one."""
    total = hashlib.blake2b(digest_size=16)
    for name, _ in model.named_parameters():
        total.update(state[name].view(-1).numpy().data)
    return total.hexdigest()
