"""Running Python, or pytest, in a lane, with a time limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.standin.lanes import Lane

__all__ = ["Ended", "LaneReport", "run_pytest", "run_python", "stop_all"]

ROOT = Path(__file__).parents[2]

#: Children under way. They are in sessions of their own, so Ctrl-C does not reach them.
_under_way: set[subprocess.Popen[str]] = set()


@dataclass(frozen=True)
class Ended:
    """How a child ended; `returncode` is None if it was killed at the time limit."""

    returncode: int | None
    output: str
    errors: str


@dataclass(frozen=True)
class LaneReport:
    """What a pytest run in a lane came to.

    Attributes
    ----------
    passed : int
        Tests that passed.
    failed : tuple of str
        Names of those that failed.
    skipped : mapping of str to int
        Reasons, and how many tests each kept from running.
    ended : Ended
        The process.
    """

    passed: int
    failed: tuple[str, ...]
    skipped: Mapping[str, int]
    ended: Ended

    def summary(self) -> str:
        """Return one line, then one for each reason to skip."""
        lines = [f"{self.passed} passed, {len(self.failed)} failed"]
        lines += [f"  skipped {count}: {reason}" for reason, count in self.skipped.items()]
        return "\n".join(lines)


def run_python(
    lane: Lane,
    script: str,
    *arguments: str,
    timeout: float = 60,
    environment: Mapping[str, str] | None = None,
    flags: tuple[str, ...] = (),
) -> Ended:
    """Run a script (dedented) in a lane; `environment` adds to the lane's."""
    command = [sys.executable, *flags, "-c", textwrap.dedent(script), *arguments]
    return _run(lane, command, timeout, environment or {})


def run_pytest(
    lane: Lane,
    *arguments: str,
    timeout: float = 120,
    environment: Mapping[str, str] | None = None,
) -> LaneReport:
    """Run tests in a lane."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--junitxml={report}", f"--basetemp={folder}/tests", *arguments]
        ended = _run(lane, command, timeout, environment or {})
        return _report(report, ended)


def _report(path: Path, ended: Ended) -> LaneReport:
    passed, failed, skipped = 0, [], Counter[str]()
    if path.exists():
        for case in ElementTree.parse(path).iter("testcase"):
            name = f"{case.get('classname')}.{case.get('name')}"
            skip = case.find("skipped")
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif skip is not None:
                skipped[skip.get("message") or "no reason given"] += 1
            else:
                passed += 1
    return LaneReport(passed, tuple(failed), dict(skipped), ended)


def _run(lane: Lane, command: list[str], timeout: float, environment: Mapping[str, str]) -> Ended:
    process = subprocess.Popen(
        [*lane.wrapper, *command],
        cwd=ROOT,
        env=os.environ | dict(lane.environment) | dict(environment),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    _under_way.add(process)
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        output, errors = process.communicate()
        return Ended(None, output, f"{errors}\nkilled after {timeout} s")
    except BaseException:
        _kill(process)
        raise
    finally:
        _under_way.discard(process)
    return Ended(process.returncode, output, errors)


def stop_all() -> None:
    """End all children under way, as when a test run is interrupted."""
    for process in list(_under_way):
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a child and what it started, which are one session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
