"""A rank's share of a save: the pieces that it writes, and where it has their content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from tensorspill.checkpoint.distributed.description import Part
from tensorspill.checkpoint.distributed.planning import Plan
from tensorspill.checkpoint.files.chunks import Box, Chunk, Source

__all__ = ["Piece", "pieces_of"]


class Piece(NamedTuple):
    """A box that a rank writes; the same in every save by one plan.

    Attributes
    ----------
    name : str
        Of the tensor.
    dtype : torch.dtype
    box : Box
        Of the whole tensor.
    partial : bool
        Whether the tensor has more than this.
    number : int
        Of the rank's part that it is from; -1 if it has no elements, and so no content.
    inside : Box or None
        Which elements of that part; None for all.
    """

    name: str
    dtype: torch.dtype
    box: Box
    partial: bool
    number: int
    inside: Box | None

    def of(self, values: Sequence[Any]) -> Chunk:
        """Return it with its content, a view, out of that of all parts of this rank."""
        return Chunk(self.name, self.box, self._content(values), self.partial)

    def _content(self, values: Sequence[Any]) -> torch.Tensor | Source:
        if self.number < 0:
            return torch.empty(self.box.lengths, dtype=self.dtype)
        value: torch.Tensor | Source = values[self.number]
        if isinstance(value, Source):
            return value if self.inside is None else value.rows(self.inside)
        if value.requires_grad:
            value = value.detach()
        return value if self.inside is None else self.inside.of(value)


def pieces_of(plan: Plan, rank: int, parts: Sequence[Part]) -> list[Piece]:
    """Return what a rank of the group writes, of the parts that it holds."""
    numbers = {(part.name, part.box): number for number, part in enumerate(parts) if part.dtype}
    found = []
    for name, held, box in plan.writes_of(rank):
        dtype, shape = plan.tensors[name]
        number = numbers[name, held] if box.numel else -1
        inside = None if box == held else box.relative_to(held)
        found.append(Piece(name, dtype, box, box.lengths != shape, number, inside))
    return found
