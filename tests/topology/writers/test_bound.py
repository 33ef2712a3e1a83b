"""The bound T* against a linear program, and what happens when planners must agree."""

import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import assume, given, settings

from tensorspill.topology.ranks.placement import Unit
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Slices
from tests.thorough import examples
from tests.topology.writers.plans import Question, questions

optimize = pytest.importorskip("scipy.optimize", reason="the linear program needs scipy")


def least_time(question: Question, copies: int = 1) -> float:
    """Minimise T so that all slices are written and no resource carries more than c * T."""
    slices, forest = Slices.of(question.slices), question.placement.forest
    machine = question.placement.where[Unit.MACHINE]
    members = [(j, rank) for j in range(len(slices)) for rank in slices.replicas(j).tolist()]
    unit = max(int(slices.nbytes.max()), 1)
    equal = np.zeros((len(slices), len(members) + 1))
    above = np.zeros((len(forest.capacity), len(members) + 1))
    above[:, -1] = -forest.capacity / 1000
    domains: dict[tuple[int, int], list[int]] = {}
    for i, (j, rank) in enumerate(members):
        equal[j, i] = 1
        path = forest.paths[forest.leaf[rank]]
        above[path[path >= 0], i] = slices.nbytes[j] / unit
        domains.setdefault((j, int(machine[rank])), []).append(i)
    upper, limits = [above], [np.zeros(len(above))]
    if copies > 1:
        rows = np.zeros((len(domains), len(members) + 1))
        for row, inside in zip(rows, domains.values(), strict=True):
            row[inside] = 1
        upper.append(rows)
        limits.append(np.ones(len(domains)))
    cost = np.zeros(len(members) + 1)
    cost[-1] = 1
    found = optimize.linprog(
        cost,
        A_ub=np.concatenate(upper),
        b_ub=np.concatenate(limits),
        A_eq=equal,
        b_eq=np.full(len(slices), copies),
        method="highs",
    )
    assert found.status == 0
    return float(found.fun) * unit / 1000


@settings(max_examples=examples(100))
@given(questions())
def test_bound_is_that_of_the_linear_program(question: Question) -> None:
    plan = plan_writers(question.slices, question.placement)
    assert float(plan.lower_bound) == pytest.approx(least_time(question), rel=1e-6, abs=1e-6)


@given(questions(unique=False))
def test_bound_of_two_copies_is_that_of_the_linear_program(question: Question) -> None:
    machine = question.placement.where[Unit.MACHINE]
    for part in question.slices:
        assume(len({int(machine[rank]) for rank in part.replicas}) > 1)
    plan = plan_writers(question.slices, question.placement, copies=2)
    assert float(plan.lower_bound) == pytest.approx(least_time(question, 2), rel=1e-6, abs=1e-6)


DIGEST = """
import random, numpy as np
from tensorspill.topology.ranks.grid import ParallelLayout
from tensorspill.topology.writers.model_state import model_state
from tensorspill.topology.ranks.placement import Placement
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Atom, Slice
layout = ParallelLayout(tp=2, pp=2, dp=8)
rates = [26000, 13000, 500, 26000]
placement = Placement.regular(4, order="cyclic", storage_mbps=rates)
state = model_state(layout, 10**9 + 7, expert_params=0, zero=1)
print(plan_writers(state, placement).digest)
names = {f"s{i}" for i in range(20)}  # a set, whose order depends on the hash seed
slices = [Slice(name, {int(name[1:]), 3, 17, 30}, nbytes=10**9 + int(name[1:])) for name in names]
slices.sort(key=lambda part: part.name)
print(plan_writers(slices, placement, exclude=["node2"], min_chunk=10**7).digest)
print(plan_writers(slices, placement, copies=2).digest)
"""


def test_every_process_makes_the_same_plan() -> None:
    """Whatever the hash seed, the number of threads and the instructions numpy may use."""
    few = "AVX512F AVX512CD AVX512_SKX AVX512_ICL AVX2 FMA3"
    found = set()
    for seed, threads, features in (("0", "1", ""), ("1", "4", ""), ("77", "2", few)):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": seed,
            "OMP_NUM_THREADS": threads,
            "NUMBA_NUM_THREADS": threads,
            "NPY_DISABLE_CPU_FEATURES": features,
        }
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIGEST],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().split()) == 3


def test_digest_depends_on_everything() -> None:
    from tensorspill.topology.ranks.placement import Placement
    from tensorspill.topology.writers.slices import Slice

    def digest(name="a", nbytes=10**9, ranks=range(8), rate=26_000, **how) -> str:
        placement = Placement.regular(2, 4, storage_mbps=[rate, 26_000])
        return plan_writers([Slice(name, ranks, nbytes)], placement, **how).digest

    base = digest()
    others = [
        digest(name="b"),
        digest(nbytes=10**9 + 1),
        digest(ranks=range(7)),
        digest(rate=25_999),
        digest(copies=2),
        digest(unit="machine"),
        digest(min_chunk=1),
        digest(exclude=["rank0"]),
        digest(block=1),
    ]
    assert digest() == base
    assert len({base, *others}) == len(others) + 1
