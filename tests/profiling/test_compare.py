"""Comparing results: the rank test against scipy's, and what counts as slower."""

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.profiling.compare import compare, rank_test
from tensorspill.profiling.rows import Results
from tests.profiling.test_rows import ROW

stats = pytest.importorskip("scipy.stats", reason="the rank test is compared with scipy's")


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 12))
def test_exact_as_scipy_says(seed, n, m):
    chance = random.Random(seed)
    first = [chance.random() for _ in range(n)]
    second = [chance.random() * 1.5 for _ in range(m)]
    expected = stats.mannwhitneyu(first, second, method="exact").pvalue
    assert rank_test(first, second) == pytest.approx(expected)


def test_ties_are_exact_as_well():
    first, second = [1.0, 2.0, 2.0, 3.0], [2.0, 3.0, 3.0, 4.0, 4.0]
    whole = stats.permutation_test(
        (first, second),
        lambda a, b: abs(stats.mannwhitneyu(a, b).statistic - len(a) * len(b) / 2),
        alternative="greater",
        n_resamples=10_000,
    )
    assert rank_test(first, second) == pytest.approx(whole.pvalue)


def test_many_samples_by_the_normal_distribution():
    chance = random.Random(3)
    first = [chance.gauss(1, 0.1) for _ in range(50)]
    second = [round(chance.gauss(1.03, 0.1), 2) for _ in range(60)]
    expected = stats.mannwhitneyu(first, second, method="asymptotic").pvalue
    assert rank_test(first, second) == pytest.approx(expected)
    assert rank_test([1.0] * 40, [1.0] * 40) == 1.0
    assert rank_test([], [1.0]) == 1.0


def results(*runs, depth=32):
    row = dataclasses.replace(ROW, depth=depth)
    found = Results()
    for rounds in runs:
        found += Results((dataclasses.replace(row, gbps_last_done=rounds[0]),), (tuple(rounds),))
    return found


FAST, SLOW = [2.0, 2.1, 2.2, 2.05, 2.15], [1.0, 1.1, 1.2, 1.05, 1.15]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (FAST, SLOW, "slower"),
        (SLOW, FAST, "faster"),
        (FAST, FAST, "same"),
        # Certain, and less than what counts.
        (FAST, [gbps * 0.97 for gbps in FAST], "same"),
        # A large difference of two single rounds is nothing that could be told from chance.
        (FAST[:1], SLOW[:1], "same"),
        # Overlapping.
        ([1.0, 2.0, 3.0, 4.0, 5.0], [0.9, 1.9, 2.4, 3.9, 4.9], "same"),
    ],
)
def test_verdicts(before, after, verdict):
    found = compare(results(before), results(after))
    assert [change.verdict for change in found.changes] == [verdict]
    assert len(found.slower) == (verdict == "slower")


def test_several_runs_count_as_one_sample_each():
    moods = [[gbps * mood for gbps in FAST] for mood in (1.0, 0.6, 1.4, 0.9)]
    others = [[gbps * mood for gbps in FAST] for mood in (0.65, 0.95, 1.35, 1.1)]
    change = compare(results(*moods), results(*others)).changes[0]
    assert (change.basis, change.samples) == ("runs", (4, 4))
    assert change.verdict == "same"


def test_many_points_do_not_make_an_alarm():
    before, after = Results(), Results()
    chance = random.Random(5)
    for depth in range(1, 101):
        before += results([chance.gauss(1, 0.2) for _ in range(5)], depth=depth)
        after += results([chance.gauss(1, 0.2) for _ in range(5)], depth=depth)
    found = compare(before, after)
    assert len(found.changes) == 100
    assert any(change.p < 0.05 for change in found.changes)
    assert found.slower == ()


def test_points_of_one_side_are_named():
    found = compare(results(FAST) + results(FAST, depth=1), results(FAST) + results(FAST, depth=2))
    assert len(found.changes) == 1
    assert found.only_before == ("aio read 1MiB x 1 in tensors of 4KiB aligned",)
    assert found.only_after == ("aio read 1MiB x 2 in tensors of 4KiB aligned",)
