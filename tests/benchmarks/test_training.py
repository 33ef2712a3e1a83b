"""A tiny run of the training benchmarks; no figure decides anything."""

import pytest

from benchmarks import training
from benchmarks.report import markdown
from benchmarks.setting import TINY

#: Optimizer builds DeepSpeed's operator, for minutes.
LONG = ("step", "memory", "optimizer")


@pytest.mark.parametrize(
    "suite", ["activations", *(pytest.param(s, marks=pytest.mark.thorough) for s in LONG)]
)
def test_suite(suite, tmp_path):
    report = training.measure(tmp_path, [suite], 1, TINY, seed=0)
    assert list(tmp_path.iterdir()) == []
    rows = report.suites[suite].rows
    assert all(row.ours is not None for row in rows)
    assert markdown(report).count("\n|") == len(rows) + 2
