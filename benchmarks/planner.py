"""How long planning takes, and how near its plans are to the bound T*.

    python benchmarks/planner.py [--ranks 1024 10240 102400] [--only chain] [--json]

For each family of layouts: seconds for the plan with its digest (a median), the same as a ratio to
a fixed numpy workload timed between the runs, makespan over T*, and the process's peak memory.
Kernels are compiled before; how long that took is stated apart. A family that is new to a process
finds compiled kernels but cold memory.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import statistics
import time

import numpy as np

from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.placement import Placement
from tensorspill.topology.ranks.replicas import ReplicaSets
from tensorspill.topology.sequences import Named
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.writers.plan import WriterPlan
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Slices

#: Seconds that a plan may take, by (ranks, kind of family).
TARGETS = {1024: 0.01, 10240: 0.1, 102400: 1.5, (102400, "regular"): 0.6, (102400, "chain"): 4.0}

FAMILIES = (
    "regular",
    "random",
    "het",
    "random het",
    "random cont",
    "hsdp4 het",
    "hsdp4 random cont",
    "sets cont",
    "moe random het",
    "zero1 het",
    "chain",
    "chain het",
    "chain cont",
    "chain random cont",
    "chain slow",
    "chain of 3",
)

STATE = 14 * 405e9  # bytes of a model of 405 G parameters


def placement(ranks: int, family: str, rng: np.random.Generator) -> Placement:
    """Return nodes of 8 ranks; ranks in random places, drives of different speed by family."""
    nodes = ranks // 8
    rates = np.full(nodes, 26_000)
    if "het" in family:
        rates = rng.choice([26_000, 22_750, 13_000, 500], size=nodes, p=[0.9, 0.06, 0.03, 0.01])
    if "cont" in family:
        rates = rng.integers(3_000, 26_000, nodes)
    if "slow" in family:
        rates[nodes // 3] = 500
    order = rng.permutation(ranks) if "random" in family else "block"
    return Placement.regular(nodes, 8, order=order, capacities=Capacities(), storage_mbps=rates)


def named(kind: str, nbytes: Integers, sets: ReplicaSets) -> Slices:
    return Slices.whole(Named(len(sets), lambda i: f"{kind}{i}"), nbytes, sets)


def state(ranks: int, family: str, rng: np.random.Generator) -> Slices:
    """Return the slices of a family."""
    every = np.arange(ranks)
    if "hsdp4" in family:
        count = ranks // 4
        table = every.reshape(4, count).T
        sizes = STATE / count * rng.uniform(0.5, 1.5, count)
        return named("shard", sizes.astype(np.int64), ReplicaSets.rows(table))
    if "sets" in family:
        count = ranks // 4
        sizes = STATE / count * rng.uniform(0.1, 2, count)
        sets = ReplicaSets.of(row.tolist() for row in rng.integers(0, ranks, (count, 8)))
        return named("set", sizes.astype(np.int64), sets)
    if "chain" in family:
        sizes = STATE / ranks * rng.uniform(0.5, 1.5, ranks)
        links = 3 if "of 3" in family else 2
        table = np.stack([(every + 8 * i) % ranks for i in range(links)], axis=1)
        return named("link", sizes.astype(np.int64), ReplicaSets.rows(table))
    dense = 38_281_000_000 + np.where(np.isin(np.arange(64) // 8, (0, 7)), 3_000_000_000, 0)
    slices = named("dense", dense, ReplicaSets.rows(every.reshape(-1, 64).T))
    if "moe" in family:
        experts = ReplicaSets.rows(every.reshape(-1, 1024).T)
        slices = slices.joined(named("expert", 9_000_000_000 + np.arange(1024), experts))
    if "zero1" in family:
        own = STATE / ranks * rng.uniform(0.5, 1.5, ranks)
        slices = slices.joined(
            named("optimizer", own.astype(np.int64), ReplicaSets.rows(every[:, None]))
        )
    return slices


def yardstick() -> float:
    """Return how long a fixed numpy workload takes: sorts and sums of 2**20 integers."""
    values = np.random.default_rng(0).integers(0, 1 << 40, 1 << 20)
    begun = time.perf_counter()
    for _ in range(3):
        order = np.argsort(values, kind="stable")
        np.add.reduceat(values[order], np.arange(0, 1 << 20, 8))
        np.cumsum(values)
    return time.perf_counter() - begun


def measure(ranks: int, family: str, rounds: int) -> dict[str, object]:
    """Plan `rounds` times, the yardstick between; return one row of figures."""
    times, ratios = [], []
    plan: WriterPlan | None = None
    for _ in range(rounds):
        # Made anew each time, so that nothing derived from them is left from the last round.
        rng = np.random.default_rng(0)
        where, slices = placement(ranks, family, rng), state(ranks, family, rng)
        unit = yardstick()
        plan = plan_writers(slices, where)
        times.append(plan.planning_s)
        ratios.append(plan.planning_s / unit)
    assert plan is not None
    kind = "chain" if "chain" in family else family
    target = TARGETS.get((ranks, kind), TARGETS.get(ranks))
    return {
        "ranks": ranks,
        "family": family,
        "planning_s": statistics.median(times),
        "planning_s_max": max(times),
        "target_s": target,
        "ratio": statistics.median(ratios),
        "lower_bound_s": plan.lower_bound_s,
        "makespan_over_bound": plan.gap + 1,
        "writers": len(plan.writers),
        "pieces": len(plan.pieces.rank),
        "digest": plan.digest,
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1024, 10240, 102400])
    parser.add_argument("--only", help="families whose name contains this")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    begun = time.perf_counter()
    plan_writers(state(128, "chain", np.random.default_rng(1)), Placement.regular(16))
    compiled = time.perf_counter() - begun
    unit = yardstick()
    say = (lambda *_: None) if options.json else print
    say(f"{platform.machine()}, numpy {np.__version__}")
    say(
        f"first plan, with its kernels compiled or loaded: {compiled:.2f} s; yardstick {unit:.3f} s"
    )
    say(f"{'ranks':>7} {'family':18} {'plan s':>8} {'max s':>8} {'target':>7} {'ratio':>6} "
        f"{'T* s':>9} {'/T*':>8} {'writers':>8} {'peak MB':>8}")  # fmt: skip
    rows = []
    for ranks in options.ranks:
        for family in FAMILIES:
            if options.only and options.only not in family:
                continue
            row = measure(ranks, family, options.rounds)
            rows.append(row)
            say(f"{ranks:7} {family:18} {row['planning_s']:8.4f} {row['planning_s_max']:8.4f} "
                f"{row['target_s']:7} {row['ratio']:6.2f} {row['lower_bound_s']:9.5f} "
                f"{row['makespan_over_bound']:8.5f} {row['writers']:8} "
                f"{row['peak_mb']:8}")  # fmt: skip
    if options.json:
        print(json.dumps({"first_plan_s": compiled, "yardstick_s": unit, "rows": rows}))


if __name__ == "__main__":
    main()
