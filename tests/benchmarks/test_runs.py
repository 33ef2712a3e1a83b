"""A tiny run of every benchmark, so that none of them rots; no figure decides anything."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks import host_path, pack_threshold, profiling
from benchmarks.report import markdown, write_json
from benchmarks.rows import Verdict
from benchmarks.setting import TINY
from tensorspill.errors import NoSpaceError
from tensorspill.profiling import fio
from tensorspill.profiling.page_cache import drop_pages, page_cache
from tensorspill.profiling.place import working_folder

ROOT = Path(__file__).parents[2]


@pytest.fixture
def no_fio(monkeypatch, tmp_path):
    """Hide fio, most of whose runs here would be its start."""
    monkeypatch.setenv("PATH", str(tmp_path))


@pytest.mark.parametrize("suite", host_path.SUITES)
def test_suite(suite, tmp_path, no_fio):
    report = host_path.measure(tmp_path, [suite], 1, TINY, seed=0)
    assert list(tmp_path.iterdir()) == []
    rows = report.suites[suite].rows
    assert rows
    assert all(row.ours is not None or "fio" in row.case for row in rows)
    write_json(report, tmp_path / "report.json")
    written = json.loads((tmp_path / "report.json").read_text())
    assert len(written["suites"][suite]["rows"]) == len(rows)
    assert markdown(report).count("\n|") == len(rows) + 2


def test_without_fio_the_rest_is_measured(tmp_path, no_fio):
    report = host_path.measure(tmp_path, ["pace"], 1, TINY, seed=0)
    with_fio, alone = report.suites["pace"].rows[:2]
    assert with_fio.verdict is Verdict.NOT_MEASURED
    assert alone.ratio is not None


@pytest.mark.skipif(not fio.available(), reason="fio is not installed")
def test_with_fio(tmp_path):
    report = host_path.measure(tmp_path, ["pace"], 1, TINY, seed=0)
    assert all(row.theirs is not None for row in report.suites["pace"].rows)


@pytest.mark.skipif(not fio.available(), reason="fio is not installed")
def test_fio_that_fails_is_no_result(tmp_path):
    with pytest.raises(fio.FioError):
        fio.run_fio(fio.FioJob(tmp_path / "file", "neither", 4096))


@pytest.mark.thorough
def test_pack_threshold(tmp_path, capsys):
    out = tmp_path / "rates.json"
    arguments = ["--folder", str(tmp_path), "--rounds", "1", "--quick", "--json", str(out)]
    assert pack_threshold.main(arguments) == 0
    assert "one by one is as fast" in capsys.readouterr().out
    assert json.loads(out.read_text())["packing"]
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.thorough
def test_profiling(tmp_path, capsys):
    out = tmp_path / "found.json"
    arguments = ["--folder", str(tmp_path), "--quick", "--json", str(out)]
    assert profiling.main([*arguments, "--only", "overhead", "tune"]) in (0, 1)
    assert "choice / best" in capsys.readouterr().out
    assert json.loads(out.read_text())["parts"].keys() == {"overhead", "tune"}
    assert list(tmp_path.iterdir()) == [out]


def test_command_line_prints_a_table(tmp_path, capsys):
    arguments = ["--folder", str(tmp_path), "--quick", "--rounds", "1", "--only", "submit"]
    assert host_path.main(arguments) == 0
    assert "constructed requests" in capsys.readouterr().out


def test_no_room_is_said_before_anything_is_written(tmp_path):
    with pytest.raises(NoSpaceError), working_folder(tmp_path, 1 << 60):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_an_ended_run_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.host_path", "--folder", str(tmp_path), "--quick"],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while not any(tmp_path.glob("*/*/large.dat")):
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def test_page_cache_tells_what_is_cached(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(os.urandom(16 * 4096))
    found = page_cache(path)
    assert (found.pages, found.cached) == (16, 16)
    if drop_pages(path).cached:
        pytest.skip("this file system keeps its pages in memory")
    assert page_cache(path).cached == 0
