"""Training the demonstration's model; where its parameters are makes no difference here."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional

from tensorspill.demo.corpus import Corpus
from tensorspill.demo.model import GPT, Shape

__all__ = ["Recipe", "Run", "Stepped", "Visit", "digest", "train", "train_in_memory"]

#: Called after each step with its number, from 1, and its loss.
Stepped = Callable[[int, float], None]

#: Makes the context in which the parameters of a module can be used.
Visit = Callable[[nn.Module], AbstractContextManager[None]]


def in_memory(_: nn.Module) -> AbstractContextManager[None]:
    """Return the context of a module whose parameters can be used at any time."""
    return nullcontext()


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
    steps: int = 40
    batch: int = 8
    rate: float = 1e-3
    warm_up: int = 8
    norm: float = 1.0
    seed: int = 0


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
    """Train with all parameters in memory; return the run and the digest of the parameters."""
    torch.manual_seed(recipe.seed)
    model = GPT(recipe.shape)
    return train(model, recipe, corpus, stepped, limit=limit), digest(model)


def train(
    model: GPT,
    recipe: Recipe,
    corpus: Corpus,
    stepped: Stepped,
    updating: Visit = in_memory,
    limit: float = math.inf,
) -> Run:
    """Train a model, updating one block after the other.

    Parameters
    ----------
    model : GPT
        Freshly made with the recipe's seed.
    recipe, corpus, stepped
        What to do, with what, and whom to tell.
    updating : callable
        Makes the context in which a module's parameters can be changed.
    limit : float
        Seconds after which no further step is begun.
    """
    parts = _parts(model)
    optimizers = [_optimizer(part) for part in parts]
    batches = corpus.batches(recipe.steps, recipe.batch, recipe.shape.context, recipe.seed)
    losses: list[float] = []
    begun = time.perf_counter()
    for inputs, targets in batches:
        logits = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), recipe.norm)
        rate = recipe.rate * min(1.0, (len(losses) + 1) / recipe.warm_up)
        _update(parts, optimizers, rate, updating)
        losses.append(loss.item())
        stepped(len(losses), losses[-1])
        if time.perf_counter() - begun > limit:
            break
    return Run(tuple(losses), time.perf_counter() - begun)


def digest(model: GPT, reading: Visit = in_memory) -> str:
    """Return a digest of all parameters; `reading` makes the context to read a module's."""
    total = hashlib.blake2b(digest_size=16)
    for part in _parts(model):
        with reading(part):
            for parameter in part.parameters():
                total.update(parameter.detach().view(-1).numpy().data)
    return total.hexdigest()


def _parts(model: GPT) -> list[nn.Module]:
    """Return the modules that are updated one after the other."""
    return [*model.blocks, model.bytes, model.places, model.last]


def _optimizer(part: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(part.parameters(), betas=(0.9, 0.95), fused=True)


def _update(
    parts: Sequence[nn.Module],
    optimizers: Sequence[torch.optim.AdamW],
    rate: float,
    updating: Visit,
) -> None:
    for part, optimizer in zip(parts, optimizers, strict=True):
        optimizer.param_groups[0]["lr"] = rate
        with updating(part):
            optimizer.step()
        optimizer.zero_grad()
