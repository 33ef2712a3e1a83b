"""How the benchmarks compute and judge; the rest of them is tried by test_runs.py."""

import random

import pytest

from benchmarks.rows import Compared, Verdict, at_least, at_most, judge
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.fio import FioError, parse
from tensorspill.profiling.rounds import Results, noise_floor, run_rounds, spread


def sample(gbps, cpu=None):
    return Sample(1.0, int(gbps * 1e9), cpu)


def test_every_case_runs_once_a_round_and_in_changing_order():
    order = []

    def case(name):
        def run():
            order.append(name)
            return sample(1)

        return run

    results = run_rounds({name: case(name) for name in "abc"}, 20, random.Random(1))
    rounds = [tuple(order[i : i + 3]) for i in range(0, 60, 3)]
    assert all(sorted(found) == ["a", "b", "c"] for found in rounds)
    assert len(set(rounds)) > 1
    assert {len(found) for found in results.samples.values()} == {20}


def test_ratios_are_those_of_pairs():
    results = Results({"ours": [sample(2), sample(30)], "theirs": [sample(1), sample(10)]})
    assert results.ratios("ours", "theirs") == pytest.approx([2, 3])


def test_what_was_not_measured_is_left_out():
    results = Results({"ours": [sample(2), sample(3)], "theirs": [None, sample(1)]})
    assert results.ratios("ours", "theirs") == pytest.approx([3])
    row = Compared("suite", Results({"ours": [sample(1)], "fio": [None]})).row(
        "ours", "fio", at_least(1.0)
    )
    assert row.verdict is Verdict.NOT_MEASURED
    assert row.theirs is None


def test_derived_cases_are_computed_round_by_round():
    results = Results({"a": [sample(1, 1.0), sample(1, 2.0)], "b": [sample(1, 0.5), None]})
    results.derive("sum", lambda a, b: Sample(1.0, 1, a.cpu + b.cpu), "a", "b")
    assert results.values("sum", lambda s: s.cpu) == [1.5, None]


def test_spread_and_noise():
    found = spread([1.0, 2.0, 3.0, 4.0, 5.0])
    assert found is not None
    assert (found.q1, found.median, found.q3) == (2.0, 3.0, 4.0)
    assert spread([]) is None
    assert noise_floor([0.9, 1.0, 1.2]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("value", "bound", "noise", "verdict"),
    [
        (0.96, at_least(0.95), 0.0, Verdict.MET),
        (0.90, at_least(0.95), 0.05, Verdict.NOT_MET),
        (0.90, at_least(0.95), 0.15, Verdict.EQUAL),
        (1.10, at_most(1.0), 0.15, Verdict.EQUAL),
        # Being equal to the reference is not enough here.
        (1.10, at_least(1.2), 0.15, Verdict.NOT_MET),
        (None, at_least(1.2), 0.15, Verdict.NOT_MEASURED),
        (5.0, None, None, Verdict.REPORTED),
    ],
)
def test_verdicts(value, bound, noise, verdict):
    assert judge(value, bound, noise) is verdict


def test_a_report_of_fio_is_read_past_its_notices():
    found = parse(
        'job : Saving output of prerun\n{"jobs": [{"error": 0, "usr_cpu": 5.0, "sys_cpu": 15.0,'
        ' "job_runtime": 2000, "read": {"io_bytes": 0, "runtime": 0},'
        ' "write": {"io_bytes": 4096, "runtime": 500}}]}'
    )
    assert (found.seconds, found.nbytes) == (0.5, 4096)
    assert found.cpu == pytest.approx(0.4)


@pytest.mark.parametrize("output", ["", "fio: broken", '{"jobs": []}'])
def test_no_report_of_fio_is_an_error(output):
    with pytest.raises(FioError):
        parse(output)
