"""A tiny run of the checkpoint benchmarks; no figure decides anything."""

import pytest

from benchmarks import checkpoint
from benchmarks.report import markdown
from benchmarks.setting import TINY


@pytest.fixture
def no_fio(monkeypatch, tmp_path):
    """Hide fio, most of whose runs here would be its start."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize(
    "suite",
    [
        pytest.param(suite, marks=[pytest.mark.thorough] * (suite != "save"))
        for suite in checkpoint.SUITES
    ],
)
def test_suite(suite, tmp_path, no_fio):
    report = checkpoint.measure(tmp_path, [suite], 1, TINY, seed=0)
    assert list(tmp_path.iterdir()) == []
    rows = report.suites[suite].rows
    assert rows
    assert all(row.ours is not None or "fio" in row.case for row in rows)
    assert markdown(report).count("\n|") == len(rows) + 2
