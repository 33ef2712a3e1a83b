"""The same training with the parameters on the drive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tensorspill.demo.corpus import Corpus
from tensorspill.demo.drive import DriveRate, measure
from tensorspill.demo.model import GPT
from tensorspill.demo.training import Recipe, Run, Stepped, digest, train
from tensorspill.errors import CapacityError
from tensorspill.pool.sizes import round_down
from tensorspill.residency import Footprint, Residency, ResidencyStatistics, footprint
from tensorspill.residency.entry import BUFFER_ALIGNMENT
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["SpilledRun", "check_budget", "measure_footprint", "train_spilled"]

#: Smaller parameters (biases, norms) stay in memory: all of them together are half a per cent.
_SMALLEST_SPILLED = 64 << 10


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
    statistics : ResidencyStatistics
        Of the training alone; `peak_bytes` counts from the making of the model.
    bytes_by_path : mapping of str to int
        Bytes moved in the training, by the path they took.
    """

    run: Run
    weights: str
    drive: DriveRate
    statistics: ResidencyStatistics
    bytes_by_path: Mapping[str, int]


def measure_footprint(recipe: Recipe) -> Footprint:
    """Return the sizes of the recipe's model without making it."""
    with torch.device("meta"):
        model = GPT(recipe.shape)
    return footprint(model, model.blocks, lambda p: p.nbytes >= _SMALLEST_SPILLED)


def check_budget(recipe: Recipe, budget: int) -> None:
    """Refuse a budget that is too small.

    Raises
    ------
    CapacityError
        Says the smallest that works.
    """
    sizes = measure_footprint(recipe)
    if budget < sizes.smallest_budget:
        raise CapacityError(
            f"A budget of {budget} bytes is too small for the largest block",
            remedy=f"The smallest that works is {sizes.smallest_budget} bytes; "
            f"{sizes.prefetch_budget} bytes do to fetch ahead as well",
        )


def train_spilled(
    recipe: Recipe,
    corpus: Corpus,
    folder: Path,
    budget: int,
    stepped: Stepped,
    watch: Callable[[Residency], None],
) -> SpilledRun:
    """Train with at most `budget` bytes of parameters in memory at a time.

    Parameters
    ----------
    recipe, corpus, stepped
        As for the training in memory.
    folder : Path
        For the spill file.
    budget : int
        Bytes, for the parameters that stay in memory and the pool together.
    watch : callable
        Told of the residency before the first step.

    Raises
    ------
    CapacityError
        The budget is too small; says the smallest that works.
    SpillError
        The drive failed.
    """
    check_budget(recipe, budget)
    pool_bytes = budget - measure_footprint(recipe).outside_bytes
    pool_bytes = round_down(pool_bytes, BUFFER_ALIGNMENT)
    with ParameterSwapper(
        folder, dtype=torch.float32, budget=pool_bytes, min_bytes=_SMALLEST_SPILLED
    ) as swapper:
        drive = measure(swapper.file)
        residencies: list[Residency] = []

        def built(model: GPT, block: torch.nn.Module) -> None:
            # Each block goes to the drive before the next is made: the model is never in memory.
            if not residencies:
                residencies.append(Residency(model, (), swapper))
            residencies[0].add(block)

        torch.manual_seed(recipe.seed)
        model = GPT(recipe.shape, built)
        with residencies[0] as residency:
            watch(residency)
            before = _bytes_by_path(swapper)
            run = train(model, recipe, corpus, stepped, residency.updating)
            residency.flush()
            statistics = residency.statistics()
            moved = _bytes_by_path(swapper) - before
            weights = digest(model, residency.resident)
    return SpilledRun(run, weights, drive, statistics, dict(moved))


def _bytes_by_path(swapper: ParameterSwapper) -> Counter[str]:
    total: Counter[str] = Counter()
    for engine in swapper.file.statistics().engines:
        total.update({path: moved.nbytes for path, moved in engine.by_path.items()})
    return total
