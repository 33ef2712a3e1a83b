"""The same training with parameters, gradients and optimizer states on the drive."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorspill import timeline
from tensorspill.demo.corpus import Corpus
from tensorspill.demo.drive import DriveRate, measure
from tensorspill.demo.model import GPT
from tensorspill.demo.training import Recipe, Run, Stepped, digest, train
from tensorspill.errors import CapacityError
from tensorspill.optimizer import SpilledOptimizer, clip_grad_norm_
from tensorspill.pool.sizes import round_down
from tensorspill.timeline import Recording, StepRecord
from tensorspill.training import Offloaded, init, offloaded, smallest_budget

__all__ = ["Budget", "Needs", "SpilledRun", "divide_budget", "measure_needs", "train_spilled"]

#: Smaller parameters (biases, norms) stay in memory: all of them together are half a per cent.
_SMALLEST_SPILLED = 64 << 10
#: AdamW's.
_STATES = 2
#: A parameter's states in memory while those of the one before are written.
_PORTIONS = 2
#: Of the budget, for optimizer states.
_PART_FOR_STATES = 0.4
_PAGE = 4096


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes of what is trained.

    Attributes
    ----------
    model, states : int
        Of all parameters, and of the optimizer's states for them.
    resident, optimizer : int
        The smallest budgets for parameters and gradients, and for states.
    """

    model: int
    states: int
    resident: int
    optimizer: int

    @property
    def total(self) -> int:
        """Parameters and states."""
        return self.model + self.states

    @property
    def smallest(self) -> int:
        """The smallest budget for everything."""
        return self.resident + self.optimizer + self.outside_states

    @property
    def outside_states(self) -> int:
        """States that are too small to be spilled, at most."""
        return self.states // 100


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget, divided.

    Attributes
    ----------
    resident : int
        Bytes for parameters and gradients.
    optimizer : int
        Bytes for states.
    """

    resident: int
    optimizer: int


@dataclass(frozen=True, slots=True)
class SpilledRun:
    """What came out of a training from the drive.

    Attributes
    ----------
    run : Run
        As of the training in memory.
    weights : str
        Digest of all parameters at the end.
    drive : DriveRate
        Measured just before.
    moved : StepRecord
        All steps as one: compute, transfers, stalls, and the bytes by the path they took.
    peak_bytes : int
        Of parameters, gradients and states in memory: the most of each, added up.
    spilled_bytes : int
        Parameters and states on the drive.
    """

    run: Run
    weights: str
    drive: DriveRate
    moved: StepRecord
    peak_bytes: int
    spilled_bytes: int


def measure_needs(recipe: Recipe) -> Needs:
    """Return the sizes of the recipe's model without making it."""
    with torch.device("meta"):
        model = GPT(recipe.shape)
    largest = max(parameter.nbytes for parameter in model.parameters())
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    resident = smallest_budget(model, gradients="spilled", min_bytes=_SMALLEST_SPILLED)
    return Needs(nbytes, _STATES * nbytes, resident, _PORTIONS * _STATES * largest)


def divide_budget(recipe: Recipe, nbytes: int) -> Budget:
    """Divide a budget.

    Raises
    ------
    CapacityError
        It is too small; says the smallest that works.
    """
    needs = measure_needs(recipe)
    if nbytes < needs.smallest:
        raise CapacityError(
            f"A budget of {nbytes} bytes is too small for the largest block and its optimizer",
            asked=needs.smallest,
            free=nbytes,
            remedy=f"The smallest that works is {needs.smallest} bytes",
        )
    nbytes -= needs.outside_states
    wanted = max(needs.optimizer, int(_PART_FOR_STATES * nbytes))
    optimizer = round_down(min(wanted, nbytes - needs.resident), _PAGE)
    return Budget(nbytes - optimizer, optimizer)


def train_spilled(
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    budget: int,
    stepped: Stepped,
    watch: Callable[[Recording], None],
) -> SpilledRun:
    """Train with at most `budget` bytes of parameters, gradients and states in memory at a time.

    Parameters
    ----------
    recipe, corpus, stepped
        As for the training in memory.
    folder : Path
        For the spill files.
    budget : int
        Bytes.
    watch : callable
        Told of the recording before the first step.

    Raises
    ------
    CapacityError
        The budget is too small; says the smallest that works.
    SpillError
        The drive failed.
    """
    parts = divide_budget(recipe, budget)
    torch.manual_seed(recipe.seed)
    with init(folder, parts.resident, gradients="spilled", min_bytes=_SMALLEST_SPILLED):
        model = GPT(recipe.shape)  # never in memory as a whole

    with offloaded(model) as handle, timeline.recording() as recorded:
        drive = measure(handle.swapper.file)
        watch(recorded)
        with SpilledOptimizer(
            torch.optim.AdamW,
            model.parameters(),
            folder=folder,
            budget=parts.optimizer,
            min_bytes=_SMALLEST_SPILLED,
            **recipe.optimizer,
        ) as optimizer:
            run = train(model, optimizer, recipe, corpus, stepped, clip_grad_norm_, recorded.step)
            with recorded.step():
                handle.flush()
                optimizer.flush()
            peak, spilled = _account(handle, optimizer)
            weights = digest(model, handle.state())
    return SpilledRun(run, weights, drive, recorded.timeline().total(), peak, spilled)


def _account(handle: Offloaded, optimizer: SpilledOptimizer) -> tuple[int, int]:
    """Return the most bytes that were in memory, and the bytes that live on the drive."""
    parameters, states = handle.statistics(), optimizer.statistics()
    gradients = handle.residency.gradients
    pool = 0 if gradients is None else gradients.pool.statistics().peak_allocated
    peak = parameters.peak_bytes + pool + states.peak_bytes + states.memory_bytes
    return peak, parameters.spilled_bytes + states.state_bytes
