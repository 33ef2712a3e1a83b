"""`benchmarks.gpu_check` where there is no GPU, and its parts rehearsed on the CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu import bandwidth, footprint, streams
from benchmarks.gpu.check import Check, NotMeasured, Outcome, Part, attempt
from benchmarks.gpu.tests import _finish, _start
from benchmarks.rows import Row, Verdict

ROOT = Path(__file__).parents[2]


@pytest.fixture
def rehearsal(tmp_path):
    return Check(tmp_path, torch.device("cpu"), time.monotonic() + 300, rounds=1, scale=512)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_everything_is_not_measured(tmp_path):
    target = tmp_path / "out.json"
    done = subprocess.run(
        # From anywhere, and not installed.
        [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--folder", str(tmp_path),
         "--json", str(target)],
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    found = json.loads(target.read_text())
    assert found["status"] == 2
    assert found["parts"].keys() == {part.name for part in gpu_check.PARTS}
    assert all("sees no GPU" in part["not measured"] for part in found["parts"].values())
    assert found["gpu"]["software"]["torch"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json"]


def test_parts_are_tried_by_themselves(rehearsal):
    row = Row("a", "b", 1.0, "x", verdict=Verdict.NOT_MET)

    def fails(_):
        raise RuntimeError("broken")

    def lacks(_):
        raise NotMeasured("not here")

    outcomes: dict[str, Outcome] = {}
    parts = [
        Part("fails", fails),
        Part("lacks", lacks),
        Part("needs", fails, needs=(lambda _: "a piece is missing",)),
        Part("long", fails, least=1e6),
    ]
    gpu_check.measure(rehearsal, outcomes, parts)
    assert outcomes["fails"].error == "RuntimeError: broken"
    assert outcomes["lacks"].why == "not here"
    assert outcomes["needs"].why == "a piece is missing"
    assert "were left" in outcomes["long"].why
    assert gpu_check._status(outcomes) == 1
    assert gpu_check._status({"x": outcomes["lacks"]}) == 2
    good = attempt(Part("good", lambda _: ([row], [])), rehearsal)
    assert gpu_check._status({"x": good}) == 1
    assert gpu_check._status({"x": Outcome([], [])}) == 0


def test_staging_rehearsed(rehearsal, monkeypatch):
    monkeypatch.setattr(bandwidth, "_EACH", 4096)
    rows, notes = bandwidth.staged(rehearsal)
    assert len(rows) == 16
    assert all(row.ours for row in rows)
    assert all(row.theirs for row in rows if "host path" in row.reference)
    assert notes
    assert list(rehearsal.folder.iterdir()) == []


def test_streams_rehearsed(rehearsal):
    (row,), wrong = streams.run(rehearsal)
    assert wrong == []
    assert row.verdict is Verdict.MET


def test_what_needs_a_gpu_says_so(rehearsal):
    for run in (footprint.run, bandwidth.direct):
        with pytest.raises(NotMeasured):
            run(rehearsal)


@pytest.mark.thorough
def test_kernels_rehearsed_in_the_interpreter(tmp_path):
    code = (
        "import json, sys, time, torch\n"
        "from pathlib import Path\n"
        "from benchmarks.gpu import kernels\n"
        "from benchmarks.gpu.check import Check\n"
        "kernels._COUNT = 4 * 65536\n"
        "check = Check(Path('.'), torch.device('cpu'), time.monotonic() + 300, 1, 65536)\n"
        "rows, _ = kernels.run(check)\n"
        "print(json.dumps([row.record() for row in rows]))"
    )
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert [row["bound"] for row in rows].count("≥ 0.6") == 6
    assert all(row["ours"] and row["theirs"] for row in rows)


@pytest.mark.thorough
def test_runs_of_pytest_are_counted(tmp_path):
    (tmp_path / "test_x.py").write_text(
        "def test_good(): pass\ndef test_bad(): assert 0\n"
        "import time\ndef test_slow(): time.sleep(100)\n"
    )
    rows: list[Row] = []
    notes: list[str] = []
    for arguments, seconds in ((["-k", "good"], 60), (["-k", "bad"], 60), (["-k", "none"], 60)):
        child = _start([str(tmp_path / "test_x.py"), *arguments], {})
        _finish(" ".join(arguments), child, seconds, rows, notes)
    assert [row.verdict for row in rows] == [Verdict.MET, Verdict.NOT_MET, Verdict.NOT_MEASURED]
    child = _start([str(tmp_path / "test_x.py"), "-k", "slow"], {})
    _finish("slow", child, 3.0, rows, notes)
    assert rows[-1].verdict is not Verdict.MET
    assert "slow: ended after 3 s" in notes


def test_what_hangs_is_given_up(tmp_path):
    code = (
        "import sys, time\n"
        "from benchmarks import gpu_check\n"
        "from benchmarks.gpu.check import Part\n"
        "gpu_check.PARTS = (Part('hangs', lambda check: time.sleep(100), 0.0),)\n"
        "gpu_check._GRACE = 1.0\n"
        "arguments = ['--folder', sys.argv[1], '--seconds', '1', '--json', sys.argv[2]]\n"
        "sys.exit(gpu_check.main(arguments))"
    )
    target = tmp_path / "out.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), str(target)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 1, done.stderr
    assert json.loads(target.read_text())["parts"]["the end"]["error"]
    assert list(tmp_path.iterdir()) == [target]
