"""``tensorspill plan``: who writes what, how long it takes, and how far that is from the best."""

from __future__ import annotations

import argparse
import json
import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorspill.topology.writers.plan import WriterPlan

__all__ = ["HELP", "add_arguments", "run"]

HELP = "plan which ranks write which bytes of a checkpoint"

_UNITS = ("none", "replica", "socket", "machine", "nic", "nvme", "gpu-switch")
_SCALE = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "T": 10**12}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("layout", nargs="?", metavar="LAYOUT", help="a JSON file with any of the following")
    add("--machine", metavar="NAME", help="a known machine, such as dgx-h100")
    add("--nodes", type=int, metavar="N", help="how many of them")
    for name, what in (
        ("tp", "tensor"),
        ("cp", "context"),
        ("ep", "expert"),
        ("dp", "data"),
        ("pp", "pipeline"),
    ):
        add(f"--{name}", type=int, metavar="N", help=f"{what} parallelism")
    add("--order", metavar="DIMS", help="which dimension changes fastest (tp-cp-ep-dp-pp)")
    add("--params", type=_count, metavar="N", help="parameters, such as 175B (default: 70B)")
    add("--expert-params", type=_count, metavar="N", help="parameters of all experts")
    add("--zero", type=int, choices=range(4), help="ZeRO stage")
    add("--replicate", type=int, metavar="N", help="replicas of each shard (HSDP)")
    add("--storage", choices=("machine", "socket", "nearest", "shared"), help="what ranks write to")
    add("--filesystem-mbps", type=int, metavar="N", help="rate of a file system that all share")
    add("--order-of-ranks", choices=("block", "cyclic"), help="how ranks are placed on machines")
    add("--unit", choices=_UNITS, help="one writer of each slice for each of these")
    add("--copies", type=int, metavar="N", help="how often to write each byte")
    add("--apart", choices=_UNITS[1:], help="what copies must not share (machine)")
    add("--exclude", action="append", metavar="NAME", help="a dead or slow resource or machine")
    add("--min-chunk", type=_count, metavar="BYTES", help="least bytes of a slice for a writer")
    add("--max-writers", type=int, metavar="N", help="most writers for a slice")
    add("--explain", type=int, metavar="RANK", help="say why a rank writes what it writes")
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Plan, and show the plan; return 0."""
    from tensorspill.errors import UnsupportedError

    plan = _plan(arguments)
    if arguments.explain is not None and not 0 <= arguments.explain < plan.placement.ranks:
        raise UnsupportedError(f"There is no rank {arguments.explain} of {plan.placement.ranks}")
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(plan, arguments.explain)) + "\n")
        return 0
    from tensorspill.commands.plan_text import explain, show

    if arguments.explain is None:
        show(plan)
    else:
        explain(plan, arguments.explain)
    return 0


def _plan(arguments: argparse.Namespace) -> WriterPlan:
    from tensorspill.topology.writers.scenario import FIELDS, Scenario

    given = {n: v for n, v in vars(arguments).items() if n in FIELDS and v is not None}
    if arguments.filesystem_mbps is not None:
        given["capacities"] = {"filesystem": arguments.filesystem_mbps}
    if arguments.layout is not None:
        return Scenario.read(arguments.layout, **given).plan()
    given.setdefault("machine", "dgx-h100")
    given.setdefault("params", 70 * 10**9)
    return Scenario(given).plan()


def _count(text: str) -> int:
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?(?:e[0-9]{1,2})?)([KMGBT]?)", text, re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no number such as 1000, 64M or 1.5e9")
    return round(float(match[1]) * _SCALE[match[2].upper()])


def _as_json(plan: WriterPlan, rank: int | None) -> dict[str, Any]:
    """Return the figures of a plan; with a rank, what that one does as well."""
    from tensorspill.topology.writers.alternatives import alternatives
    from tensorspill.topology.writers.explain import bottlenecks, reason

    others = alternatives(plan.slices, plan.placement)
    bound = plan.lower_bound_s
    found: dict[str, Any] = {
        "makespan_s": plan.makespan_s,
        "lower_bound_s": bound,
        "lower_bound_us": str(plan.lower_bound),
        "gap": plan.gap,
        "relaxed": plan.relaxed,
        "digest": plan.digest,
        "planning_s": plan.planning_s,
        "ranks": plan.placement.ranks,
        "machines": plan.placement.machines,
        "nbytes": int(plan.slices.nbytes.sum()),
        "slices": len(plan.slices),
        "pieces": len(plan.pieces.rank),
        "writers": [{"rank": rank, "nbytes": int(plan.written[rank])} for rank in plan.writers],
        "bottlenecks": list(bottlenecks(plan)),
        "notes": list(plan.placement.notes),
        # Each byte once, whatever the plan's copies.
        "alternatives": {
            other.rule: {
                "makespan_s": other.makespan_s,
                "lower_bound_s": bound,
                "writers": other.writers,
                **({"why_not": other.why_not} if other.why_not else {}),
            }
            for other in others
        },
    }
    if rank is not None:
        why = reason(plan, rank)
        found["explain"] = {
            "rank": rank,
            "nbytes": why.nbytes,
            "reason": why.text,
            "busy": dict(why.busy),
            "pieces": [vars(piece) for piece in plan.pieces_of(rank)],
        }
    return found
