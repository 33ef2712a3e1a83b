"""What one writer writes: boxes of tensors, and Python objects as bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch

from tensorspill.checkpoint.files.dtypes import name_of
from tensorspill.errors import UnsupportedError

__all__ = ["Box", "Chunk", "ObjectChunk", "Source", "element_boxes"]


class Box(NamedTuple):
    """A part of a tensor: where it begins in each dimension, and how far it reaches.

    Attributes
    ----------
    offsets, lengths : tuple of int
        One of each for every dimension; none for a tensor without dimensions.
    """

    offsets: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Self:
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def numel(self) -> int:
        """Elements inside."""
        return math.prod(self.lengths)

    def intersection(self, other: Box) -> Box | None:
        """Return what two boxes share, or None if that has no element."""
        offsets, lengths = [], []
        for start, length, begin, reach in zip(*self, *other, strict=True):
            low, high = max(start, begin), min(start + length, begin + reach)
            if low >= high:
                return None
            offsets.append(low)
            lengths.append(high - low)
        return Box(tuple(offsets), tuple(lengths))

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether it lies in a tensor of that shape."""
        return len(shape) == len(self.offsets) == len(self.lengths) and all(
            offset >= 0 and length >= 0 and offset + length <= size
            for offset, length, size in zip(*self, shape, strict=True)
        )

    def relative_to(self, origin: Box) -> Box:
        """Return the same part, counted from the first element of `origin`."""
        offsets = tuple(a - b for a, b in zip(self.offsets, origin.offsets, strict=True))
        return Box(offsets, self.lengths)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return this part of a tensor, as a view."""
        for dim, (offset, length) in enumerate(zip(*self, strict=True)):
            if length != tensor.shape[dim]:
                tensor = tensor.narrow(dim, offset, length)
        return tensor


class Source:
    """Content of a chunk that is produced piece by piece; for what does not fit in memory.

    Attributes
    ----------
    dtype : torch.dtype
    shape : tuple of int
    whole : torch.Tensor or None
        The distributed tensor that it is this process's part of; its values don't matter.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    whole: torch.Tensor | None = None

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Put elements `start` and following, in row-major order, into 1-D `out`, all of it."""
        raise NotImplementedError

    def rows(self, box: Box) -> Source:
        """Return some rows of it, a box of it with all of every dimension but the first."""
        return _Rows(self, box)


class _Rows(Source):
    def __init__(self, source: Source, box: Box) -> None:
        self.dtype = source.dtype
        self.shape = box.lengths
        self._source = source
        self._begin = box.offsets[0] * math.prod(box.lengths[1:])

    def fill(self, start: int, out: torch.Tensor) -> None:
        self._source.fill(self._begin + start, out)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """A box of a tensor and its content.

    Attributes
    ----------
    name : str
        Of the tensor in the checkpoint.
    box : Box
        Which part of it.
    tensor : torch.Tensor or Source
        The part, of shape ``box.lengths``; any strides, any device. It must not change before the
        write has ended.
    partial : bool
        Whether the tensor has more than this; then the part is named in the file as well.
    """

    name: str
    box: Box
    tensor: torch.Tensor | Source
    partial: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the content."""
        return math.prod(self.box.lengths) * self.tensor.dtype.itemsize

    def check(self) -> None:
        """Raise `UnsupportedError` unless name, box and content fit together."""
        tensor = self.tensor
        offsets, lengths = self.box
        negative = offsets and min(offsets) < 0
        if tensor.shape != lengths or len(offsets) != len(lengths) or negative:
            raise UnsupportedError(
                f"Part {self.box} of tensor {self.name!r} has content of shape "
                f"{tuple(tensor.shape)}"
            )
        if isinstance(tensor, torch.Tensor) and (
            tensor.layout is not torch.strided or tensor.is_meta
        ):
            raise UnsupportedError(
                f"Tensor {self.name!r} is {tensor.layout} on {tensor.device}: no plain memory"
            )
        name_of(tensor.dtype)


@dataclass(frozen=True, slots=True)
class ObjectChunk:
    """A Python object, in the bytes that it is to be kept as.

    Attributes
    ----------
    name : str
    data : bytes
    """

    name: str
    data: bytes


def element_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Cut elements ``[start, stop)`` of a row-major tensor into as few boxes as possible.

    They come in the order of the elements, so that their contents, one after the other, are the
    elements' bytes.
    """
    if start >= stop:
        return
    if not shape:
        yield Box((), ())
        return
    inner = math.prod(shape[1:])
    first, last = start // inner, -(-stop // inner)
    if last - first == 1 and stop - start < inner:
        yield from _deeper(shape, first, start - first * inner, stop - first * inner)
        return
    if start % inner:
        yield from _deeper(shape, first, start - first * inner, inner)
        first += 1
    end = stop // inner
    if end > first:
        rest = tuple(shape[1:])
        yield Box((first, *(0,) * len(rest)), (end - first, *rest))
    if stop % inner:
        yield from _deeper(shape, end, 0, stop - end * inner)


def _deeper(shape: Sequence[int], row: int, start: int, stop: int) -> Iterator[Box]:
    for box in element_boxes(shape[1:], start, stop):
        yield Box((row, *box.offsets), (1, *box.lengths))
