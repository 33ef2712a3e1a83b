"""The tests that need a GPU: the conformance suite on its memory, and those marked gpu and gds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.gpu.check import Check, NotMeasured
from benchmarks.gpu.pieces import no_cupy
from benchmarks.rows import Row, Verdict

__all__ = ["conformance", "marked"]

ROOT = Path(__file__).parents[2]
_COUNTS = re.compile(r"(\d+) (passed|failed|error|errors|skipped|deselected|warnings?)")
#: Seconds that the conformance suite, and the tests marked gpu, may take.
_MOST = 80.0


def conformance(check: Check) -> tuple[list[Row], list[str]]:
    """Run the suite on tensors of torch and on arrays of CuPy, at the same time."""
    runs, why = {"torch": "cuda-torch"}, no_cupy(check)
    if why is None:
        runs["CuPy"] = "cuda-cupy"
    rows, notes = _run(
        check,
        {
            f"conformance, {library}": (
                ["tests/conformance"],
                {"TENSORSPILL_TEST_MEMORY": memory, "TENSORSPILL_TEST_LANES": "staged"},
            )
            for library, memory in runs.items()
        },
    )
    if why is not None:
        rows.append(Row("tests", "conformance, CuPy", None, "", verdict=Verdict.NOT_MEASURED))
        notes.append(f"conformance, CuPy: {why}")
    return rows, notes


def marked(check: Check) -> tuple[list[Row], list[str]]:
    """Run the tests marked gpu, and those marked gds where a folder was given."""
    arguments = ["tests", "-m", "gpu"]
    if check.gds is not None:
        arguments = ["tests", "-m", "gpu or gds", "--gds-dir", str(check.gds)]
    environment = {"TENSORSPILL_GPU_CHECK": "1"}
    return _run(check, {"tests marked gpu and gds": (arguments, environment)})


def _run(
    check: Check, runs: dict[str, tuple[list[str], dict[str, str]]]
) -> tuple[list[Row], list[str]]:
    """Run pytest for each name, all at once, within the time that is left."""
    if not (ROOT / "tests").is_dir():
        raise NotMeasured("the tests are not here")
    rows: list[Row] = []
    notes: list[str] = []
    children = {name: _start(*run) for name, run in runs.items()}
    end = time.monotonic() + min(_MOST, check.left)
    try:
        for name, child in children.items():
            _finish(name, child, end - time.monotonic(), rows, notes)
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.communicate()
    return rows, notes


def _start(arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "--tb=line", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def _finish(
    name: str, child: subprocess.Popen[str], seconds: float, rows: list[Row], notes: list[str]
) -> None:
    try:
        output, _ = child.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        child.kill()
        output, _ = child.communicate()
        notes.append(f"{name}: ended after {seconds:.0f} s")
    counts = {kind: int(number) for number, kind in _COUNTS.findall(output[-2000:])}
    good = child.returncode == 0 and counts.get("passed", 0) > 0
    bad = counts.get("failed", 0) + counts.get("error", 0) + counts.get("errors", 0)
    verdict = Verdict.MET if good else Verdict.NOT_MET
    if child.returncode == 5 or (not counts and child.returncode != 0 and not bad):
        verdict = Verdict.NOT_MEASURED
    rows.append(Row("tests", name, float(counts.get("passed", 0)), "passed", verdict=verdict))
    lines = [
        line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "SKIPPED"))
    ]
    notes += [f"{name}: {line[:200]}" for line in lines[:20]]
    if not good and output.strip():
        notes.append(f"{name}: {output.strip().splitlines()[-1][:200]}")
