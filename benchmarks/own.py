"""Cases of our own: transfers through an engine's file and through a spill file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.setting import Setting
from tensorspill.engine import Engine, File, Request
from tensorspill.opening import open_engine
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import check_same, poison, refresh
from tensorspill.profiling.files import check_written
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.spill.file import SpillFile

__all__ = ["BLOCK", "DEPTH", "Mover", "file_mover", "open_measured", "read", "spill_mover", "write"]

#: What every comparison with fio is made at.
BLOCK = 1 << 20
DEPTH = 32


@dataclass(frozen=True, slots=True)
class Mover:
    """One way to move some tensors to and from a drive.

    Attributes
    ----------
    tensors : sequence of torch.Tensor
        uint8, 1-D.
    write, read : callable
        Move all of them, and return when that is done.
    places : callable
        Returns where the bytes are: (path, offset) for each tensor, contiguous in the file.
    """

    tensors: Sequence[torch.Tensor]
    write: Callable[[], object]
    read: Callable[[], object]
    places: Callable[[], list[tuple[str, int]]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def open_measured(folder: Path) -> Engine:
    """Open the engine with the options that all comparisons are made with."""
    return open_engine(folder, backend="aio", block_bytes=BLOCK, depth=DEPTH)


def file_mover(
    engine: Engine,
    file: File,
    tensors: Sequence[torch.Tensor],
    offsets: Sequence[int],
    prepared: bool = False,
) -> Mover:
    """Return the mover to given offsets of an engine's file, as one batch.

    With `prepared` the batch is checked and lowered beforehand, and not each time it moves.
    """

    def requests(write: bool) -> list[Request]:
        pairs = zip(tensors, offsets, strict=True)
        return [Request(tensor, file, offset, write=write) for tensor, offset in pairs]

    batches = {way: engine.prepare(requests(way)) for way in (False, True)} if prepared else {}

    def move(write: bool) -> object:
        return engine.submit(batches[write] if prepared else requests(write)).result()

    return Mover(
        tensors,
        lambda: move(True),
        lambda: move(False),
        lambda: [(file.path, offset) for offset in offsets],
    )


def spill_mover(spill: SpillFile, tensors: Mapping[str, torch.Tensor]) -> Mover:
    """Return the mover to a spill file, as one batch."""

    def places() -> list[tuple[str, int]]:
        return [(at.path, at.offset) for name in tensors for at in spill.location(name)[:1]]

    return Mover(
        list(tensors.values()),
        lambda: spill.put(tensors).result(),
        lambda: spill.get(tensors).result(),
        places,
    )


def write(mover: Mover, setting: Setting, checks: int = 64) -> Sample:
    """Time a write of content that was never written before, and look whether it is there."""
    for tensor in mover.tensors:
        refresh(tensor)
    sample = timed(mover.write, mover.nbytes, setting.idle)
    places = mover.places()
    step = max(1, len(places) // checks)
    for tensor, (path, offset) in list(zip(mover.tensors, places, strict=True))[::step]:
        check_written(Path(path), tensor.numpy(), offset, max(1, checks // len(places)))
    return sample


def read(
    mover: Mover, expected: Sequence[torch.Tensor], setting: Setting, watch: CacheWatch
) -> Sample:
    """Time a read into poisoned memory, and compare all bytes with what they should be."""
    for tensor in mover.tensors:
        poison(tensor)
    for path in dict.fromkeys(path for path, _ in mover.places()):
        watch.look(path)
    sample = timed(mover.read, mover.nbytes, setting.idle)
    for number, (tensor, wanted) in enumerate(zip(mover.tensors, expected, strict=True)):
        check_same(tensor, wanted, f"tensor {number}")
    return sample
