"""A tiny run of the training benchmarks; no figure decides anything."""

import pytest

from benchmarks import training
from benchmarks.report import markdown
from benchmarks.setting import TINY


@pytest.mark.thorough  # optimizer builds DeepSpeed's operator, for minutes
@pytest.mark.parametrize("suite", ["activations", "step", "memory", "optimizer"])
def test_suite(suite, tmp_path):
    report = training.measure(tmp_path, [suite], 1, TINY, seed=0)
    assert list(tmp_path.iterdir()) == []
    rows = report.suites[suite].rows
    assert all(row.ours is not None for row in rows)
    assert markdown(report).count("\n|") == len(rows) + 2
