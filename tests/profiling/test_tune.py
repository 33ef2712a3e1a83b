"""Tuning: who goes on, what is chosen, and a small run on a real folder."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.profiling.site import Site
from tensorspill.profiling.tune import (
    Candidate,
    Mix,
    candidates,
    choose,
    deepspeed_block,
    survivors,
    tune,
)

MIB = 1 << 20


def candidate(cost, rates):
    made = Candidate(cost * 4096, 1, 1)
    made.gbps[:] = rates
    made.ratios[:] = [rate / 10 for rate in rates]
    return made


def around(rate, spread, chance, count=9):
    return [rate * chance.uniform(1 - spread, 1 + spread) for _ in range(count)]


def test_the_smallest_within_95_per_cent_is_chosen():
    chance = random.Random(1)
    rates = {8: 10.0, 4: 9.9, 2: 9.7, 1: 8.0}
    found = [candidate(cost, around(rate, 0.005, chance)) for cost, rate in rates.items()]
    assert choose(found).cost[0] == 2 * 4096


def test_what_is_not_sure_is_not_chosen():
    chance = random.Random(2)
    found = [candidate(8, around(10, 0.01, chance)), candidate(1, around(9.55, 0.3, chance))]
    assert choose(found).cost[0] == 8 * 4096
    assert choose([candidate(8, [10.0]), candidate(1, [9.9])]).cost[0] == 8 * 4096


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=40, unique=True), st.data())
def test_survivors_are_as_many_as_asked_and_have_the_fastest(rates, data):
    keep = data.draw(st.integers(1, len(rates)))
    left = [candidate(cost + 1, [rate]) for cost, rate in enumerate(rates)]
    found = survivors(left, keep)
    assert len(found) == len(set(found)) == keep
    ranked = sorted(left, key=lambda each: each.gbps[0], reverse=True)
    assert set(ranked[: (keep + 1) // 2]) <= set(found)


def test_a_small_one_that_may_be_good_enough_survives_larger_ones():
    left = [candidate(100 - i, [10.0 - i / 100]) for i in range(9)] + [candidate(1, [9.0])]
    assert left[-1] in survivors(left, 5)


def test_a_mix_is_one_direction_after_the_other():
    assert Mix(0.5).rate({"read": 1.0, "write": 3.0}) == pytest.approx(1.5)
    assert Mix(1.0).rate({"read": 2.0}) == 2.0
    assert Mix(0.0).directions == ("write",)
    with pytest.raises(UnsupportedError):
        Mix(1.5)


def test_candidates_can_fill_their_queues():
    many, few = candidates(256 * MIB, 8), candidates(4 * MIB, 1)
    assert len({tuple(each.options.values()) for each in many}) == len(many) > 40
    assert few
    assert all(each.cost[0] <= 2 * MIB and each.threads == 1 for each in few)
    assert candidates(1, 1)


def test_deepspeed_gets_true_booleans():
    block = deepspeed_block({"block_bytes": MIB, "depth": 16, "threads": 2})["aio"]
    assert block == {
        "block_size": MIB,
        "queue_depth": 16,
        "intra_op_parallelism": 2,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }


def test_a_run(tmp_path):
    told = []
    with Site(tmp_path, 8 * MIB) as site:
        tried = [Candidate(65536 << (n % 4), 1 + n, 1) for n in range(12)]
        found = tune(
            site,
            Mix(0.7, tensor_bytes=MIB),
            tried,
            1.5,
            lambda done, total, text: told.append((done, total)),
            random.Random(4),
        )
    assert found.choice in found.finalists
    assert found.best is found.finalists[0]
    assert (found.engine, found.tried) == ("aio", 12)
    assert len(found.finalists) == 6
    assert len({len(each.gbps) for each in found.finalists}) == 1
    assert {row.direction for row in found.rows} == {"read", "write"}
    assert all(row.verified for row in found.rows if row.direction == "read")
    assert told == sorted(told)
    assert all(done <= total == 1.5 for done, total in told)
