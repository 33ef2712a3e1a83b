"""Which bytes of a stored part a want needs, and how they lie in its destination."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.records import BoxRecord

__all__ = ["Run", "runs_of"]

#: Rows of at most so many bytes are read whole where only some columns are wanted: reading pieces
#: of less than that apart is slower than reading what lies between them.
WHOLE_ROW = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Contiguous bytes of a stored part.

    Attributes
    ----------
    record : BoxRecord
        The part.
    start : int
        Where the run begins, in bytes from the part's first.
    shape : tuple of int
        Of the run's elements, row-major.
    wanted : Box
        Which of these are wanted.
    destination : torch.Tensor
        Where they go; of shape ``wanted.lengths``.
    """

    record: BoxRecord
    start: int
    shape: tuple[int, ...]
    wanted: Box
    destination: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the run."""
        return math.prod(self.shape) * self.destination.dtype.itemsize

    @property
    def whole(self) -> bool:
        """Whether all of the run is wanted."""
        return self.wanted.lengths == self.shape


def runs_of(record: BoxRecord, wanted: Box, destination: torch.Tensor) -> Iterator[Run]:
    """Cut what is wanted of a stored part into runs.

    Parameters
    ----------
    record : BoxRecord
    wanted : Box
        Inside the part, in coordinates of the whole tensor.
    destination : torch.Tensor
        Of shape ``wanted.lengths``.
    """
    inner = wanted.relative_to(record.box)
    yield from _cut(record, record.box.lengths, inner, 0, destination)


def _cut(
    record: BoxRecord, shape: tuple[int, ...], wanted: Box, start: int, destination: torch.Tensor
) -> Iterator[Run]:
    itemsize = destination.dtype.itemsize
    if not shape:
        yield Run(record, start, (), Box((), ()), destination)
        return
    row = math.prod(shape[1:]) * itemsize
    whole_rows = wanted.lengths[1:] == shape[1:]
    first, count = wanted.offsets[0], wanted.lengths[0]
    if whole_rows or row <= WHOLE_ROW:
        inside = Box((0, *wanted.offsets[1:]), wanted.lengths)
        yield Run(record, start + first * row, (count, *shape[1:]), inside, destination)
        return
    below = Box(wanted.offsets[1:], wanted.lengths[1:])
    for index in range(count):
        at = start + (first + index) * row
        yield from _cut(record, shape[1:], below, at, destination[index])
