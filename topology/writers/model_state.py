"""What training holds: weights and optimizer state, replicated or sharded by ZeRO stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.grid import ParallelLayout, RankGrid
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.sequences import Named
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.writers.slices import Slices

__all__ = ["model_state"]


def model_state(
    layout: ParallelLayout,
    params: int,
    *,
    expert_params: int = 0,
    zero: int = 0,
    weight_bytes: int = 2,
    optimizer_bytes: int = 12,
    replicate: int = 1,
) -> Slices:
    """Return the slices of a model's state.

    At stage 0 weights and optimizer state are replicated over data and context parallelism (the
    experts' over edp); at 1 and 2 the optimizer's state is sharded over these, at 3 the weights
    too. What is sharded has one holder and is written whole by it. Parameters are divided evenly
    over tensor and pipeline parallelism, an expert's over ep as well.

    Parameters
    ----------
    layout : ParallelLayout
        How ranks are arranged.
    params : int
        Parameters of the dense part.
    expert_params : int
        Parameters of all experts together.
    zero : int
        ZeRO stage, 0 to 3.
    weight_bytes, optimizer_bytes : int
        Bytes for each parameter.
    replicate : int
        Shards are replicated so many times over data parallelism, as hybrid sharding (HSDP) does;
        the replicas of a shard are ``dp / replicate`` ranks apart.

    Raises
    ------
    UnsupportedError
        For a stage that does not exist, or a `replicate` that does not divide.
    """
    if zero not in (0, 1, 2, 3):
        raise UnsupportedError(f"ZeRO stage {zero} is none of 0, 1, 2 and 3")
    how = _Sizes(zero, weight_bytes, optimizer_bytes, replicate)
    parts = _part("", layout.dense, ("cp", "dp"), params, how)
    if expert_params:
        parts += _part("expert.", layout.experts, ("edp",), expert_params, how)
    return parts[0].joined(*parts[1:]) if len(parts) > 1 else parts[0]


class _Sizes(NamedTuple):
    zero: int
    weight_bytes: int
    optimizer_bytes: int
    replicate: int


def _part(
    prefix: str, grid: RankGrid, over: Sequence[str], params: int, how: _Sizes
) -> list[Slices]:
    """Return the slices of the dense part, or of the experts."""
    sharded = {0: (), 1: ("optimizer",), 2: ("optimizer",), 3: ("weights", "optimizer")}[how.zero]
    whole = [kind for kind in ("weights", "optimizer") if kind not in sharded]
    size = {"weights": how.weight_bytes, "optimizer": how.optimizer_bytes}
    over = [dim for dim in grid.dims if dim in over]
    sets, labels = grid.groups(over), grid.labels(over)
    found = []
    for kind in whole:
        names = [f"{prefix}{kind}.{label}" for label in labels]
        found.append(Slices.whole(names, _evenly(params * size[kind], len(sets)), sets))
    if sharded:
        each = sum(size[kind] for kind in sharded)
        found.append(_shards(prefix + "+".join(sharded), grid, over, params * each, how.replicate))
    return found


def _shards(kind: str, grid: RankGrid, over: Sequence[str], nbytes: int, replicate: int) -> Slices:
    """Return shards over some dimensions, each held by `replicate` ranks."""
    sets = grid.groups(over)
    across = int(sets.sizes[0])
    if replicate < 1 or across % replicate:
        raise UnsupportedError(f"{replicate} replicas of shards do not divide {across} ranks")
    blocks = sets.ranks.reshape(len(sets), replicate, across // replicate)
    table = blocks.transpose(0, 2, 1).reshape(-1, replicate)
    names = Named(len(table), lambda i: f"{kind}.shard{i}")
    return Slices.whole(names, _evenly(nbytes, len(table)), ReplicaSets.rows(table))


def _evenly(total: int, count: int) -> Integers:
    """Return `total` in `count` parts that differ by 1 at most."""
    each, more = divmod(total, count)
    return np.where(np.arange(count) < more, each + 1, each)
