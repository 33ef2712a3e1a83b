"""The model that training is measured with: equal blocks, of a size that is asked for."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

from tensorspill.optimizer import SpilledOptimizer
from tensorspill.residency.staging import modest
from tensorspill.training import Offloaded, init, offloaded

__all__ = ["Case", "InMemory", "Spilled", "Stack", "calibrated", "step"]

#: Parameters of less than this stay in memory.
SMALLEST = 16 << 10


class Block(nn.Module):
    """A perceptron, added to what comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.expand = nn.Linear(width, 4 * width)
        self.contract = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the next block's input."""
        hidden = functional.gelu(self.expand(self.norm(x)))
        result: torch.Tensor = x + self.contract(hidden)
        return result


class Stack(nn.Module):
    """Equal blocks, one behind the other."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the last block's output."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True, slots=True)
class Case:
    """A model and what is fed to it.

    Attributes
    ----------
    blocks, width, rows : int
        Of the model; rows of input in a step.
    """

    blocks: int
    width: int
    rows: int

    @property
    def block_bytes(self) -> int:
        """Bytes of a block's parameters, nearly."""
        return 8 * self.width * self.width * 4

    def batch(self, seed: int) -> torch.Tensor:
        """Return input for a step."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.rows, self.width, generator=generator)


class InMemory:
    """The model and its optimizer in memory.

    Attributes
    ----------
    loss : float
        Of the last step.
    """

    def __init__(self, case: Case) -> None:
        torch.manual_seed(0)
        self.model = Stack(case.blocks, case.width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.loss = 0.0

    def step(self, batch: torch.Tensor) -> None:
        """Take a step."""
        self.loss = step(self.model, self.optimizer, batch)


class Spilled:
    """The model with parameters, gradients and optimizer states on the drive.

    Parameters
    ----------
    case : Case
    folder : Path
    resident, optimizer : int
        Budgets in bytes.
    in_backward : bool
        Step in the middle of backward.
    """

    def __init__(
        self,
        case: Case,
        folder: Path,
        resident: int,
        optimizer: int,
        in_backward: bool = False,
    ) -> None:
        torch.manual_seed(0)
        with init(folder, resident, gradients="spilled", min_bytes=SMALLEST):
            self.model = Stack(case.blocks, case.width)
        self.handle: Offloaded = offloaded(self.model)
        self.optimizer = SpilledOptimizer(
            torch.optim.AdamW,
            self.model.parameters(),
            folder=folder,
            budget=optimizer,
            min_bytes=SMALLEST,
            in_backward=in_backward,
            engine=modest(optimizer, "cpu", {}),
            lr=1e-4,
            fused=True,
        )

    def pool_bytes(self) -> int:
        """Return the most that was taken of all pools, and parameters that stay in memory."""
        gradients, states = self.handle.residency.gradients, self.optimizer.statistics()
        pool = 0 if gradients is None else gradients.pool.statistics().peak_allocated
        return self.handle.statistics().peak_bytes + pool + states.peak_bytes

    def close(self) -> None:
        """End it."""
        self.optimizer.close()
        self.handle.close()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> float:
    """Take a step; return the loss."""
    loss = model(batch).square().mean()
    torch.autograd.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def calibrated(blocks: int, width: int, seconds: float) -> Case:
    """Return a case whose step takes about so many seconds in memory."""
    torch.manual_seed(0)
    model = Stack(blocks, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = 64
    for _ in range(6):
        case = Case(blocks, width, rows)
        batch = case.batch(0)
        step(model, optimizer, batch)
        begun = time.perf_counter()
        step(model, optimizer, batch)
        taken = time.perf_counter() - begun
        if 0.85 < taken / seconds < 1.15:
            break
        rows = min(max(8, int(rows * min(max(seconds / taken, 0.25), 4.0))), 1 << 16)
    return case
