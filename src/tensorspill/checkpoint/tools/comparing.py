"""What is different between two checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.dtypes import name_of
from tensorspill.checkpoint.files.reading import Reader
from tensorspill.checkpoint.files.records import TensorRecord

__all__ = ["Comparison", "Difference", "compare"]

#: Bytes of a tensor that are in memory at a time, of each side.
WINDOW = 64 << 20


@dataclass(frozen=True, slots=True)
class Difference:
    """A tensor or object that the two do not have alike.

    Attributes
    ----------
    name : str
    kind : {"only in first", "only in second", "dtype", "shape", "values", "object"}
    detail : str
    largest : float or None
        Of tensors of numbers that differ in values, the largest absolute difference; NaN if one
        side alone is NaN somewhere.
    """

    name: str
    kind: str
    detail: str = ""
    largest: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `compare` found.

    Attributes
    ----------
    first, second : str
        Paths.
    equal : int
        Tensors and objects that are equal to the bit.
    by_digest : int
        Of the tensors among these, those that were not even read.
    differences : tuple of Difference
        In the order of names.
    """

    first: str
    second: str
    equal: int
    by_digest: int
    differences: tuple[Difference, ...]


def compare(first: str | os.PathLike[str], second: str | os.PathLike[str]) -> Comparison:
    """Compare two checkpoints to the bit, however each is divided into files.

    Tensors whose parts are the same on both sides are equal if their digests are, and need not be
    read.

    Raises
    ------
    SpillError
        One of them can't be read, or is damaged where it was read.
    """
    with Reader(first) as a, Reader(second) as b:
        found: list[Difference] = []
        equal = by_digest = 0
        left, right = a.manifest.tensors, b.manifest.tensors
        for name in sorted(left.keys() | right.keys()):
            difference = _one_sided(name, name in left, name in right)
            if difference is None and _same_digests(left[name], right[name]):
                equal, by_digest = equal + 1, by_digest + 1
                continue
            difference = difference or _compared(name, a, b)
            equal += difference is None
            found += [difference] if difference is not None else []
        ours, theirs = a.manifest.objects, b.manifest.objects
        for name in sorted(ours.keys() | theirs.keys()):
            difference = _one_sided(name, name in ours, name in theirs)
            if difference is None and a.read_object(name) != b.read_object(name):
                difference = Difference(name, "object", "other bytes")
            equal += difference is None
            found += [difference] if difference is not None else []
        return Comparison(a.folder, b.folder, equal, by_digest, tuple(found))


def _one_sided(name: str, first: bool, second: bool) -> Difference | None:
    if first and second:
        return None
    return Difference(name, "only in first" if first else "only in second")


def _same_digests(a: TensorRecord, b: TensorRecord) -> bool:
    def parts(tensor: TensorRecord) -> set[tuple[Box, int, bytes]]:
        return {(box.box, box.span, box.digests) for box in tensor.boxes}

    return a.dtype is b.dtype and a.shape == b.shape and parts(a) == parts(b)


def _compared(name: str, a: Reader, b: Reader) -> Difference | None:
    left, right = a.manifest.tensors[name], b.manifest.tensors[name]
    if left.dtype is not right.dtype:
        return Difference(name, "dtype", f"{name_of(left.dtype)} and {name_of(right.dtype)}")
    if left.shape != right.shape:
        return Difference(name, "shape", f"{left.shape} and {right.shape}")
    elements, largest = 0, 0.0
    for ours, theirs in zip(_windows(a, name), _windows(b, name), strict=True):
        different, distance = _distance(ours, theirs)
        elements += different
        largest = distance if distance != distance or largest != largest else max(largest, distance)
    if not elements:
        return None
    numbers = left.dtype.is_floating_point or not left.dtype.is_complex
    return Difference(name, "values", f"{elements} elements differ", largest if numbers else None)


def _windows(reader: Reader, name: str) -> Iterator[torch.Tensor]:
    """Read a tensor in pieces; each is valid until the next is asked for."""
    record = reader.manifest.tensors[name]
    total = torch.Size(record.shape).numel()
    step = max(WINDOW // record.dtype.itemsize, 1)
    memory = torch.empty(min(step, total), dtype=record.dtype)
    for start in range(0, total, step):
        count = min(step, total - start)
        reader.read_elements(name, start, memory[:count])
        yield memory[:count]


def _distance(a: torch.Tensor, b: torch.Tensor) -> tuple[int, float]:
    """Return how many elements differ in their bits, and by how much at most."""
    itemsize = a.dtype.itemsize
    raw_a, raw_b = (x.view(torch.uint8).view(-1, itemsize) for x in (a, b))
    differ = (raw_a != raw_b).any(dim=1)
    count = int(differ.sum())
    if not count or a.dtype.is_complex:
        return count, 0.0
    x, y = a[differ].to(torch.float64), b[differ].to(torch.float64)
    gap = (x - y).abs()
    # Equal infinities, and NaNs of other bits, are not apart.
    gap[(x == y) | (x.isnan() & y.isnan())] = 0.0
    return count, float(gap.max())
