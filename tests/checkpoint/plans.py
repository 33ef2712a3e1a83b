"""Descriptions of states for the planner, and what must hold for every plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tensorspill.checkpoint.distributed.description import Claim, Part
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.distributed.planning import Plan, make_plan
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.coverage import why_not_covered
from tensorspill.topology.ranks.rank_table import RankRecord, RankTable

Shape = tuple[int, ...]


def part(
    name: str,
    shape: Shape,
    box: Box | None = None,
    ranks: tuple[int, ...] = (),
    dtype: str = "float32",
    why: str = "test",
) -> Part:
    """Return a part; without ranks nothing is known about replicas."""
    box = box or Box.whole(shape)
    return Part(name, dtype, shape, *box, Claim(ranks, why) if ranks else None)


def replicated(name: str, shape: Shape, ranks: tuple[int, ...]) -> Part:
    """Return a whole tensor that is replicated on ranks."""
    return part(name, shape, ranks=ranks)


def table(size: int, hosts: int = 1) -> RankTable:
    """Return ranks shared out to hosts, in blocks."""
    each = math.ceil(size / hosts)
    return RankTable(
        tuple(RankRecord(rank=r, host=f"host{r // each}", local_rank=r % each) for r in range(size))
    )


def plan_of(parts: Sequence[Sequence[Part]], hosts: int = 1, **limits: object) -> Plan:
    """Plan for ranks 0, 1, …"""
    size = len(parts)
    found = Limits(table=table(size, hosts), **limits)  # type: ignore[arg-type]
    return make_plan(parts, range(size), found.placement(table(size)), found, "question")


def check_plan(plan: Plan, parts: Sequence[Sequence[Part]]) -> None:
    """Check that everything is written once, by who holds it."""
    boxes: dict[str, list[Box]] = {name: [] for name in plan.tensors}
    for rank, held in enumerate(parts):
        mine = {(p.name, p.box) for p in held}
        size = 0
        for name, source, box in plan.writes_of(rank):
            dtype, shape = plan.tensors[name]
            if math.prod(shape):
                assert (name, source) in mine
                assert source.intersection(box) == box
            boxes[name].append(box)
            size += box.numel * dtype.itemsize
        assert size == plan.written[rank]
        for name in plan.objects_of(rank):
            assert rank == min(r for r, p in enumerate(parts) if any(o.name == name for o in p))
    for name, (_, shape) in plan.tensors.items():
        assert why_not_covered(shape, boxes[name]) is None
