"""Whether replicas are equal: by digests, before tensors are cut among their holders."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tensorspill.checkpoint.distributed.description import Held
from tensorspill.checkpoint.distributed.group import Ranks
from tensorspill.checkpoint.distributed.planning import Plan
from tensorspill.checkpoint.files.chunks import Source
from tensorspill.errors import UnsupportedError
from tensorspill.pool.digest import digest

__all__ = ["compare_replicas"]


def compare_replicas(ranks: Ranks, plan: Plan, held: Held, timeout: float) -> None:
    """Compare the digests of all replicas; a collective of the group.

    Raises
    ------
    UnsupportedError
        Some differ; on every rank the same.
    RankFailedError
        A rank was lost.
    """
    boxes = list(plan.replicated())
    names = ((part.name, part.box) for part in held.parts)
    values = dict(zip(names, held.values, strict=True))
    mine = np.zeros(len(boxes), np.uint64)
    for number, (name, box, holders) in enumerate(boxes):
        if ranks.rank in holders:
            mine[number] = digest(_tensor(values[name, box]).contiguous().cpu())
    every = [np.frombuffer(part, np.uint64) for part in ranks.gather(mine.tobytes(), timeout)]
    for number, (name, _, holders) in enumerate(boxes):
        first, other = holders[0], _differs([int(every[rank][number]) for rank in holders])
        if other:
            raise UnsupportedError(
                f"Tensor {name!r} differs between ranks {first} and {holders[other]} of the group, "
                f"and should be equal",
                remedy="Give what differs by rank a name that differs by rank",
            )


def _tensor(value: torch.Tensor | Source) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value.detach()
    filled = torch.empty(value.shape, dtype=value.dtype)
    value.fill(0, filled.view(-1))
    return filled


def _differs(digests: Sequence[int]) -> int:
    """Return the index of the first digest that is not like the first; 0 if there is none."""
    return next((i for i, value in enumerate(digests) if value != digests[0]), 0)
