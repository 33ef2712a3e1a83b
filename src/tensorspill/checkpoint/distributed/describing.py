"""From states to plans: describing what this rank holds, and planning with all others."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tensorspill.checkpoint.distributed.description import (
    Held,
    decode_parts,
    describe,
    encode_parts,
)
from tensorspill.checkpoint.distributed.group import Ranks, combined, rank_record, table_of
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.distributed.nested import Path
from tensorspill.checkpoint.distributed.planning import Plan, make_plan
from tensorspill.checkpoint.distributed.replication import Replicas

__all__ = ["Describer", "plan_together"]


class Describer:
    """Describes one state after another, and knows whether one is like the last one.

    Parameters
    ----------
    ranks : Ranks
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._vouched: tuple[str, ...] = ()
        self._replicas = Replicas((), ranks.ranks)
        self._last: tuple[Any, str] | None = None

    def describe(
        self,
        flat: Mapping[str, Any],
        paths: Mapping[str, Path],
        vouched: tuple[str, ...],
        limits: Limits,
        asks: tuple[Any, ...],
    ) -> tuple[Held, str]:
        """Return what this rank holds, and a digest of that and of what it asks.

        Parameters
        ----------
        flat, paths
            The state, from `flatten`.
        vouched : tuple of str
            See `Replicas`.
        limits : Limits
        asks : tuple
            What else decides about a plan; equal if their representations are.
        """
        if vouched != self._vouched:
            self._vouched, self._replicas = vouched, Replicas(vouched, self._ranks.ranks)
        replicas = self._replicas
        replicas.look(everywhere=False)
        held = describe(flat, paths, replicas.claim)
        if replicas.searches and (
            not self._is_last(held, limits, asks) or _lacks_claims(held, limits.min_chunk)
        ):
            # There may be new modules and optimizers.
            replicas.look(everywhere=True)
            held = describe(flat, paths, replicas.claim)
        if not self._is_last(held, limits, asks):
            known = hashlib.blake2b(encode_parts(held.parts), digest_size=16)
            mine = self._ranks.ranks, self._ranks.rank
            known.update(repr((held.paths, limits, asks, mine)).encode())
            self._last = (held.parts, held.paths, limits, asks), known.hexdigest()
        return held, self._last[1] if self._last else ""

    def _is_last(self, held: Held, limits: Limits, asks: tuple[Any, ...]) -> bool:
        asked = held.parts, held.paths, limits, asks
        return self._last is not None and self._last[0] == asked


def _lacks_claims(held: Held, min_chunk: int) -> bool:
    """Whether there is a plain tensor that would be cut, if anything was known about it."""
    return any(
        part.dtype
        and part.claim is None
        and part.lengths == part.shape
        and value.nbytes >= min_chunk
        for part, value in zip(held.parts, held.values, strict=True)
    )


def plan_together(ranks: Ranks, held: Held, folder: str, limits: Limits, timeout: float) -> Plan:
    """Exchange descriptions, and make the plan that every other rank makes as well.

    Raises
    ------
    RankFailedError
        A rank was lost.
    UnsupportedError
        What `make_plan` raises; on every rank the same.
    """
    head = json.dumps([rank_record(ranks, folder), list(held.paths.items())])
    every = ranks.gather(head.encode() + b"\n" + encode_parts(held.parts), timeout)
    records, described = [], []
    paths: dict[str, Any] = {}
    known: dict[bytes, Any] = {}
    for data in every:
        first, _, rest = data.partition(b"\n")
        record, items = json.loads(first)
        records.append(record)
        paths.update((name, tuple(path)) for name, path in items)
        if rest not in known:
            known[rest] = decode_parts(rest)
        described.append(known[rest])
    question = combined([hashlib.blake2b(data).hexdigest() for data in every])
    placement = limits.placement(table_of(records))
    plan = make_plan(described, ranks.ranks, placement, limits, question)
    return replace(plan, paths=paths)
