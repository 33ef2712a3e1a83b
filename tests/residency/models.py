"""Small models of every kind that a residency has to cope with, and training for them."""

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tensorspill.residency import Residency

WIDTH = 24
VALUES = 32


class Perceptron(nn.Module):
    """Linear's backward saves ``weight.t()``, a view of the parameter's memory."""

    def __init__(self, hidden: int = 48, width: int = WIDTH):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, hidden)
        self.contract = nn.Linear(hidden, width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x + self.contract(functional.gelu(self.expand(self.norm(x))))


class Model(nn.Module):
    """Blocks of different shapes between an embedding and a head."""

    def __init__(self, blocks: int = 5):
        super().__init__()
        self.bytes = nn.Embedding(VALUES, WIDTH)
        self.blocks: Any = nn.ModuleList(self.make_block(number) for number in range(blocks))
        self.head = nn.Linear(WIDTH, VALUES)

    def make_block(self, number: int) -> nn.Module:
        return Perceptron(32 * (number % 3 + 1))

    def forward(self, text):
        return self.head(self.through(self.bytes(text)))

    def through(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Tied(Model):
    """Weights shared between blocks, and between a block and the embedding."""

    def __init__(self):
        super().__init__()
        self.blocks[3].expand.weight = self.blocks[0].expand.weight
        self.blocks[4].contract.weight = self.blocks[1].contract.weight
        self.blocks[1].expand.weight = self.bytes.weight = nn.Parameter(torch.randn(64, WIDTH))


class Reused(Model):
    def through(self, x):
        for number in (0, 1, 2, 1, 3, 0, 4, 4):
            x = self.blocks[number](x)
        return x


class Frozen(Model):
    """Whole blocks, and parts of blocks, the first one's input included."""

    def __init__(self):
        super().__init__()
        self.bytes.weight.requires_grad_(False)
        for parameter in (*self.blocks[0].parameters(), *self.blocks[2].parameters()):
            parameter.requires_grad_(False)
        self.blocks[1].expand.weight.requires_grad_(False)
        self.blocks[3].norm.weight.requires_grad_(False)
        self.blocks[2].contract.bias.requires_grad_(True)


class Checkpointed(Model):
    """Activation checkpointing around every block."""

    reentrant = False

    def through(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class ReentrantlyCheckpointed(Checkpointed):
    reentrant = True


class CheckpointedInside(Model):
    """Activation checkpointing inside of every block."""

    class Block(nn.Module):
        def __init__(self, hidden):
            super().__init__()
            self.inner = Perceptron(hidden)
            self.after = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.after(checkpoint(self.inner, x, use_reentrant=False))

    def make_block(self, number):
        return self.Block(32 * (number % 2 + 1))


class Skipping(Model):
    """Inputs of early blocks are used by late ones: gradients come from two sides."""

    def through(self, x):
        inputs = []
        for block in self.blocks[:2]:
            inputs.append(x)
            x = block(x)
        x = self.blocks[2](x)
        for block in self.blocks[3:]:
            x = block(x + inputs.pop()) * (1 + x.mean())
        return x


class HandingOut(Model):
    """Blocks that return views of their parameters, also a parameter itself, in containers."""

    class Block(nn.Module):
        def __init__(self, rows):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.table = nn.Parameter(torch.randn(rows, WIDTH))

        def forward(self, x):
            return self.linear(x), {"rows": self.table[: x.shape[1]], "all": [self.table, x]}

    def make_block(self, number):
        return self.Block(16 + 8 * number)

    def through(self, x):
        tables = []
        for block in self.blocks:
            x, more = block(x)
            x = x + more["rows"]
            tables.append(more["all"][0])
        return x + sum(table.mean() for table in tables)


class Nested(Model):
    """Blocks inside of blocks."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = nn.Linear(WIDTH, WIDTH)
            self.inner = Perceptron()
            self.after = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.after(self.inner(self.before(x).tanh()).tanh())

    def make_block(self, number):
        return self.Block()

    def units(self):
        return [unit for block in self.blocks for unit in (block, block.inner)]


class Clamping(Model):
    """Weights changed in place by forward itself."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            with torch.no_grad():
                self.linear.weight.clamp_(-0.1, 0.1)
            return x + self.linear(x)

    def make_block(self, number):
        return self.Block()


class Convolving(Model):
    """Convolutions, bilinear forms, a recurrent cell and a norm reparametrised."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution = nn.utils.parametrizations.weight_norm(
                nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            )
            self.form = nn.Bilinear(WIDTH, WIDTH, WIDTH)
            self.memory = nn.GRU(WIDTH, WIDTH, batch_first=True)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            x = self.convolution(x.transpose(1, 2)).transpose(1, 2)
            return self.memory(self.form(x, x.tanh()))[0] * self.scale

    def make_block(self, number):
        return self.Block()


KINDS = [
    Model,
    Tied,
    Reused,
    Frozen,
    Checkpointed,
    ReentrantlyCheckpointed,
    CheckpointedInside,
    Skipping,
    HandingOut,
    Nested,
    Clamping,
    Convolving,
]

#: For what stands on residency; the others are tried by thorough runs.
_DEFAULT = (Model, Tied, Reused, CheckpointedInside, Nested)
SOME_KINDS = [
    pytest.param(kind, marks=[pytest.mark.thorough] * (kind not in _DEFAULT)) for kind in KINDS
]


def units_of(model: Model) -> list[nn.Module]:
    """Return the modules that are fetched and let go as a whole."""
    return model.units() if isinstance(model, Nested) else list(model.blocks)


def batches(steps: int, seed: int = 7) -> Iterator[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield torch.randint(VALUES, (2, 9), generator=generator)


def loss_of(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(model(text).flatten(0, 1), text.flatten())


class Trainer:
    """Trains a model block by block; `residency` is None for training in memory."""

    def __init__(self, model: Model, residency: Residency | None = None, **options: Any):
        self.model = model
        self.updating: Any = residency.updating if residency else lambda *_: nullcontext()
        taken: set[nn.Parameter] = set()
        self.optimizers = []
        for module in (*model.blocks, model):
            mine = [p for p in module.parameters() if p.requires_grad and p not in taken]
            taken.update(mine)
            if mine:
                self.optimizers.append((module, torch.optim.AdamW(mine, lr=0.01, **options), mine))

    def step(self, text: torch.Tensor) -> float:
        loss = loss_of(self.model, text)
        loss.backward()
        self.update()
        return loss.item()

    def update(self) -> None:
        for module, optimizer, mine in self.optimizers:
            outside = module is self.model
            with nullcontext() if outside else self.updating(module):
                optimizer.step()
            for parameter in mine:
                parameter.grad = None

    def train(self, steps: int) -> list[float]:
        return [self.step(text) for text in batches(steps)]
