"""What every suite is given: where, how often, how much."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["FULL", "QUICK", "TINY", "Setting", "Sizes"]

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the suites move.

    Attributes
    ----------
    large : int
        Bytes of the one large transfer.
    tensors, tensor_bytes : int
        Of the batch of middling tensors.
    pages : int
        Tensors of 4 KiB in a batch.
    swapped, swapped_bytes : int
        Parameters of the swapper, and bytes of each.
    saved : int
        Bytes that are saved by torch.save, and that are touched for the first time.
    submitted : int
        Requests of the batch whose submission is timed.
    cycles : int
        Times that everything is opened and closed.
    reserved : int
        Bytes asked of a pool.
    """

    large: int
    tensors: int
    tensor_bytes: int
    pages: int
    swapped: int
    swapped_bytes: int
    saved: int
    submitted: int
    cycles: int
    reserved: int


FULL = Sizes(
    large=1024 * MIB,
    tensors=2000,
    tensor_bytes=256 << 10,
    pages=20_000,
    swapped=64,
    swapped_bytes=4 * MIB,
    saved=256 * MIB,
    submitted=1000,
    cycles=1000,
    reserved=512 * MIB,
)
QUICK = Sizes(
    large=128 * MIB,
    tensors=400,
    tensor_bytes=256 << 10,
    pages=8000,
    swapped=16,
    swapped_bytes=4 * MIB,
    saved=64 * MIB,
    submitted=1000,
    cycles=100,
    reserved=128 * MIB,
)
#: So small that only the code is tried, not the machine.
TINY = Sizes(
    large=4 * MIB,
    tensors=8,
    tensor_bytes=256 << 10,
    pages=64,
    swapped=3,
    swapped_bytes=1 * MIB,
    saved=2 * MIB,
    submitted=50,
    cycles=8,
    reserved=8 * MIB,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a suite is given.

    Attributes
    ----------
    folder : Path
        An empty folder of the suite's own, on the file system to be measured.
    rounds : int
    sizes : Sizes
    chance : random.Random
        For the order of cases.
    idle : float
        CPU seconds a second that the process uses when it does nothing.
    tick : callable
        Told what is being done.
    """

    folder: Path
    rounds: int
    sizes: Sizes
    chance: random.Random
    idle: float
    tick: Callable[[str], None] = lambda _: None

    @property
    def fewer_rounds(self) -> int:
        """Rounds for what takes long and has no bound to keep."""
        return min(self.rounds, max(2, self.rounds // 3))
