"""What a rank holds of a state: a part for each tensor or object, to plan with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from tensorspill.checkpoint.distributed.nested import Path
from tensorspill.checkpoint.files.chunks import Box, Source
from tensorspill.checkpoint.files.dtypes import name_of
from tensorspill.errors import UnsupportedError

__all__ = ["Claim", "Held", "Part", "decode_parts", "describe", "encode_parts"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Claim(NamedTuple):
    """That a part is equal on several ranks, and why.

    Attributes
    ----------
    ranks : tuple of int
        Global ranks, growing.
    why : str
        Names what it is a replica of; parts are replicas of each other only if this is equal too.
    """

    ranks: tuple[int, ...]
    why: str


class Part(NamedTuple):
    """What a rank holds of one name.

    Attributes
    ----------
    name : str
    dtype : str
        In the form of manifests; empty for a Python object.
    shape : tuple of int
        Of the whole tensor.
    offsets, lengths : tuple of int
        The box of it that is held.
    claim : Claim or None
        None: nothing is known about other ranks.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    offsets: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()
    claim: Claim | None = None

    @property
    def box(self) -> Box:
        """The box."""
        return Box(self.offsets, self.lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """The parts that this rank holds, with their content.

    Attributes
    ----------
    parts : list of Part
    values : list
        For each part its plain tensor or source of shape ``lengths``, or the object.
    paths : dict of str to tuple of str or int
        Where each name is in the nested state.
    """

    parts: list[Part] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    paths: dict[str, Path] = field(default_factory=dict)


def describe(
    flat: Mapping[str, Any],
    paths: Mapping[str, Path],
    claim_of: Callable[[str, torch.Tensor], Claim | None] | None = None,
) -> Held:
    """Return what this rank holds.

    Parameters
    ----------
    flat, paths
        From `flatten`.
    claim_of : callable, optional
        Returns what is known about a plain tensor of that name.

    Raises
    ------
    UnsupportedError
        A tensor is of a kind that can't be kept; the message names it.
    """
    held = Held(paths=dict(paths))
    boxes: dict[Any, Any] = {}
    for name, value in flat.items():
        if isinstance(value, Source):
            _source(held, name, value, boxes)
        elif not isinstance(value, torch.Tensor):
            held.parts.append(Part(name, ""))
            held.values.append(value)
        elif type(value) in _PLAIN:
            shape = tuple(value.shape)
            claim = claim_of(name, value) if claim_of else None
            held.parts.append(
                Part(name, _dtype(name, value), shape, (0,) * len(shape), shape, claim)
            )
            held.values.append(value)
        else:
            _other(held, name, value, claim_of, boxes)
    return held


def _source(held: Held, name: str, value: Source, boxes: dict[Any, Any]) -> None:
    shape = tuple(value.shape)
    part = Part(name, name_of(value.dtype), shape, (0,) * len(shape), shape)
    if value.whole is not None:
        from tensorspill.checkpoint.distributed.dtensors import part_of

        whole: Any = value.whole
        found = part_of(name, whole, boxes)
        if found is None:
            return
        part = found[0]._replace(dtype=part.dtype)
    held.parts.append(part)
    held.values.append(value)


def _dtype(name: str, tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "has no memory (device meta)" if tensor.is_meta else f"is {tensor.layout}"
        raise UnsupportedError(
            f"Tensor {name!r} {'is quantized' if tensor.is_quantized else kind}",
            remedy="Save tensors that are strided and have memory",
        )
    try:
        return name_of(tensor.dtype)
    except UnsupportedError as error:
        raise UnsupportedError(f"Tensor {name!r}: {error}") from None


def _other(
    held: Held,
    name: str,
    value: torch.Tensor,
    claim_of: Callable[[str, torch.Tensor], Claim | None] | None,
    boxes: dict[Any, Any],
) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        from tensorspill.checkpoint.distributed.dtensors import part_of

        found = part_of(name, value, boxes)
        if found is not None:
            part, local = found
            held.parts.append(part._replace(dtype=_dtype(name, local)))
            held.values.append(local)
        return
    for box, shape, local in _by_protocol(name, value):
        claim = claim_of(name, value) if claim_of and box == Box.whole(shape) else None
        held.parts.append(Part(name, _dtype(name, local), shape, *box, claim))
        held.values.append(local)


def _by_protocol(
    name: str, value: torch.Tensor
) -> Sequence[tuple[Box, tuple[int, ...], torch.Tensor]]:
    """Return boxes of what follows DCP's protocol (FSDP1's ShardedTensor, wrapper subclasses)."""
    from torch.distributed.checkpoint.planner_helpers import _create_write_items
    from torch.distributed.checkpoint.utils import find_tensor_shard

    found = []
    for item in _create_write_items(name, value):
        data = item.tensor_data
        if data is None or data.chunk is None:
            raise UnsupportedError(f"Tensor {name!r} of type {type(value).__name__} has no box")
        box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
        local = find_tensor_shard(value, item.index)
        found.append((box, tuple(data.size), local.detach()))
    return found


def encode_parts(parts: Sequence[Part]) -> bytes:
    """Return parts as JSON; equal parts have equal bytes, in every process."""
    claims: dict[Claim, int] = {}
    rows = []
    for part in parts:
        number = -1 if part.claim is None else claims.setdefault(part.claim, len(claims))
        rows.append((*part[:-1], number) if part.dtype else (part.name,))
    return json.dumps([list(claims), rows], separators=(",", ":")).encode()


def decode_parts(data: bytes) -> list[Part]:
    """Return what `encode_parts` was given."""
    listed, rows = json.loads(data)
    claims = [Claim(tuple(ranks), why) for ranks, why in listed]
    found = []
    for row in rows:
        if len(row) == 1:
            found.append(Part(row[0], ""))
            continue
        name, dtype, shape, offsets, lengths, number = row
        claim = None if number < 0 else claims[number]
        found.append(Part(name, dtype, tuple(shape), tuple(offsets), tuple(lengths), claim))
    return found
