"""Who writes which boxes: the plan that follows from what all ranks hold and where they are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from tensorspill.checkpoint.distributed.description import Claim, Part
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.files.chunks import Box, element_boxes
from tensorspill.checkpoint.files.dtypes import dtype_of
from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.placement import Placement
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.writers.plan import WriterPlan
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Slices

__all__ = ["Plan", "Write", "make_plan"]


class Write(NamedTuple):
    """A box that a rank writes, out of the box that it holds."""

    name: str
    held: Box
    box: Box


class _Atom(NamedTuple):
    """A box that several ranks hold: `rows` pieces of `row` bytes that are not cut further."""

    name: str
    box: Box
    item: int
    rows: int
    row: int


@dataclass(frozen=True, eq=False)
class Plan:
    """Who writes what; the same on every rank.

    Attributes
    ----------
    tensors : dict of str to (torch.dtype, tuple of int)
        Every tensor of the checkpoint, whole.
    objects : dict of str to int
        The rank of the group that writes each Python object.
    written : tuple of int
        Bytes of tensors that each rank writes.
    digest : str
        128 bits over question and answer, as hexadecimal digits.
    writers : WriterPlan or None
        Of what is replicated; None if nothing is.
    replicas : sequence of tuple of int
        The sets of ranks that hold replicas.
    paths : mapping of str to tuple of str or int
        Where each name is in the nested state, on whichever rank it is.
    """

    tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
    objects: Mapping[str, int]
    written: tuple[int, ...]
    digest: str
    writers: WriterPlan | None
    _alone: Sequence[Sequence[Write]]
    _shared: Sequence[Sequence[_Atom]]
    replicas: Sequence[tuple[int, ...]] = field(default=())
    paths: Mapping[str, tuple[str | int, ...]] = field(default_factory=dict)

    def writes_of(self, rank: int) -> list[Write]:
        """Return what a rank of the group writes."""
        return [*self._alone[rank], *self._cut(rank)]

    def objects_of(self, rank: int) -> list[str]:
        """Return the names of the Python objects that a rank writes."""
        return [name for name, writer in self.objects.items() if writer == rank]

    def replicated(self) -> Iterator[tuple[str, Box, tuple[int, ...]]]:
        """Return each box that several ranks are known to hold equal, with these ranks."""
        for atoms, ranks in zip(self._shared, self.replicas, strict=True):
            for atom in atoms:
                yield atom.name, atom.box, ranks

    def _cut(self, rank: int) -> Iterator[Write]:
        if self.writers is None:
            return
        pieces = self.writers.pieces
        for i in np.flatnonzero(pieces.rank == rank).tolist():
            number = int(pieces.slice[i])
            if number < len(self._shared):
                yield from _boxes(self._shared[number], int(pieces.start[i]), int(pieces.stop[i]))


def _boxes(atoms: Sequence[_Atom], start: int, stop: int) -> Iterator[Write]:
    """Return the boxes of the bytes `start` to `stop` of atoms that stand in a line."""
    at = 0
    for atom in atoms:
        end = at + atom.rows * atom.row
        if end > start and at < stop:
            first, last = max(start, at) - at, min(stop, end) - at
            if last - first == end - at:
                yield Write(atom.name, atom.box, atom.box)
            else:
                for box in element_boxes(atom.box.lengths, first // atom.item, last // atom.item):
                    moved = map(sum, zip(box.offsets, atom.box.offsets, strict=True))
                    yield Write(atom.name, atom.box, Box(tuple(moved), box.lengths))
        at = end


def make_plan(
    parts: Sequence[Sequence[Part]],
    ranks: Sequence[int],
    placement: Placement,
    limits: Limits,
    question: str,
) -> Plan:
    """Plan a save; a function of its arguments alone, so that every rank makes the same plan.

    Parameters
    ----------
    parts : sequence of sequence of Part
        What each rank of the group holds.
    ranks : sequence of int
        The global number of each.
    placement : Placement
        Of the group's ranks.
    limits : Limits
    question : str
        A digest of all `parts`.

    Raises
    ------
    UnsupportedError
        Ranks disagree about a tensor, parts of one are missing, or nobody who holds it may write.
    """
    live = _live(placement, limits)
    tensors, holders, objects = _holders(parts)
    _check_volumes(tensors, holders)
    alone: list[list[Write]] = [[] for _ in parts]
    shared: dict[tuple[int, ...], list[_Atom]] = {}
    single = np.zeros(len(parts), np.int64)
    for (name, box), found in holders.items():
        dtype, shape = tensors[name]
        replicas = _replicas(name, box.numel > 0, found, ranks, live)
        if len(replicas) == 1:
            whole = box if box.numel else Box.whole(shape)
            alone[replicas[0]].append(Write(name, box, whole))
            single[replicas[0]] += box.numel * dtype.itemsize
        else:
            atom = _atom(name, box, dtype.itemsize, limits.min_chunk)
            shared.setdefault(replicas, []).append(atom)
    writer_of = {name: _lowest(name, held, live) for name, held in objects.items()}
    writers = _plan_shared(shared, single, placement, limits) if shared else None
    written = single if writers is None else writers.written
    digest = _digest(question, ranks, limits, writers, written.tolist())
    every = tuple(shared.values()), tuple(shared)
    return Plan(
        tensors, writer_of, tuple(written.tolist()), digest, writers, alone, every[0], every[1]
    )


_Holders = dict[tuple[str, Box], dict[int, Claim | None]]
_Tensors = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def _holders(
    parts: Sequence[Sequence[Part]],
) -> tuple[_Tensors, _Holders, dict[str, list[int]]]:
    """Return the tensors, who holds each box of them, and who holds each object."""
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    holders: _Holders = {}
    objects: dict[str, list[int]] = {}
    for rank, every in enumerate(parts):
        for name, dtype, shape, offsets, lengths, claim in every:
            known = kinds.setdefault(name, (dtype, shape))
            if known[0] != dtype or known[1] != shape:
                raise _disagreement(name, rank, known, (dtype, shape))
            if not dtype:
                objects.setdefault(name, []).append(rank)
                continue
            box = Box(offsets, lengths)
            if box.numel or not math.prod(shape):
                key = name, box if box.numel else Box.whole(shape)
                holders.setdefault(key, {}).setdefault(rank, claim)
    tensors = {name: (dtype_of(d), shape) for name, (d, shape) in kinds.items() if d}
    return tensors, holders, objects


def _disagreement(
    name: str, rank: int, first: tuple[str, tuple[int, ...]], second: tuple[str, tuple[int, ...]]
) -> UnsupportedError:
    def words(kind: tuple[str, tuple[int, ...]]) -> str:
        return f"{kind[0]} of shape {kind[1]}" if kind[0] else "a Python object"

    return UnsupportedError(
        f"{name!r} is {words(second)} on rank {rank} of the group and {words(first)} on another",
        remedy="What differs by rank needs a name that differs by rank",
    )


def _check_volumes(tensors: _Tensors, holders: _Holders) -> None:
    """Raise if the parts of a tensor can't be all of it, each element once."""
    volume = dict.fromkeys(tensors, 0)
    for name, box in holders:
        volume[name] += box.numel
    for name, (_, shape) in tensors.items():
        whole = math.prod(shape)
        if volume[name] != whole:
            what = "overlap" if volume[name] > whole else "are not all of it"
            raise UnsupportedError(
                f"The parts of tensor {name!r}, of shape {shape}, that the ranks of this group "
                f"hold {what}: {volume[name]} elements of {whole}",
                remedy="Save with the group whose ranks hold all parts, and name what differs by "
                "rank differently",
            )


def _live(placement: Placement, limits: Limits) -> list[bool]:
    forest = (placement.without(limits.exclude) if limits.exclude else placement).forest
    live: list[bool] = forest.alive[forest.leaf].tolist()
    return live


def _replicas(
    name: str,
    nonempty: bool,
    found: Mapping[int, Claim | None],
    ranks: Sequence[int],
    live: Sequence[bool],
) -> tuple[int, ...]:
    """Return who may write a box: all that hold what the first one holds, or the first one."""
    first = _lowest(name, found, live)
    claim = found[first]
    if claim is None or not nonempty:
        return (first,)
    return tuple(
        rank
        for rank, other in found.items()
        if rank == first or (other == claim and ranks[rank] in claim.ranks)
    )


def _lowest(name: str, found: Iterable[int], live: Sequence[bool]) -> int:
    every = list(found)
    for rank in every:
        if live[rank]:
            return rank
    raise UnsupportedError(
        f"{name!r} is held only by ranks {', '.join(map(str, every))} of the group, which write "
        f"through what is excluded",
        remedy="Exclude less",
    )


def _atom(name: str, box: Box, item: int, min_chunk: int) -> _Atom:
    """Return how a box can be cut: along as few leading dimensions as it takes to be fine enough.

    Stacked experts have few and large rows; there the second dimension is cut as well.
    """
    nbytes = box.numel * item
    if nbytes < min_chunk:
        return _Atom(name, box, item, 1, nbytes)
    rows, row = 1, nbytes
    for length in box.lengths:
        if row <= min_chunk:
            break
        rows, row = rows * length, row // length
    return _Atom(name, box, item, rows, row)


def _plan_shared(
    shared: Mapping[tuple[int, ...], Sequence[_Atom]],
    single: np.ndarray[tuple[int], np.dtype[np.int64]],
    placement: Placement,
    limits: Limits,
) -> WriterPlan:
    """Plan the sets of replicas, next to what ranks have to write in any case."""
    alone = np.flatnonzero(single)
    names = [f"replicas {number}" for number in range(len(shared))]
    names += [f"of rank {rank} alone" for rank in alone.tolist()]
    number, sets = ReplicaSets.of([*shared, *((int(rank),) for rank in alone)]).distinct()
    atoms = [atom for group in shared.values() for atom in group]
    counts = [*map(len, shared.values()), *(1 for _ in alone)]
    slices = Slices(
        names,
        sets,
        number,
        np.cumsum([0, *counts], dtype=np.int64),
        np.array([*(atom.rows for atom in atoms), *(1 for _ in alone)], np.int64),
        np.array([*(atom.row for atom in atoms), *single[alone].tolist()], np.int64),
        [*(atom.name for atom in atoms), *names[len(shared) :]],
    )
    return plan_writers(
        slices,
        placement,
        unit=limits.unit,
        max_writers=limits.max_writers,
        exclude=limits.exclude,
        block=limits.min_chunk,
    )


def _digest(
    question: str,
    ranks: Sequence[int],
    limits: Limits,
    writers: WriterPlan | None,
    written: Sequence[int],
) -> str:
    answer = writers.digest if writers is not None else ""
    whole = ("tensorspill.save.1", question, tuple(ranks), limits, answer, tuple(written))
    return hashlib.blake2b(repr(whole).encode(), digest_size=16).hexdigest()
