"""Trying GPUDirect Storage where it can do no harm: in another process, with a time limit.

libcufile may wait for ever, crash or end the process, depending on the node. So nothing here loads
it: a child process does, and reports step by step.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["LIMIT", "Report", "run"]

#: Seconds: many times what the probe takes on a node with a slow disk.
LIMIT = 30.0

_SCRIPT = Path(__file__).with_name("probe_child.py")

Steps = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Report:
    """What a probe found out.

    Attributes
    ----------
    steps : mapping of str to mapping
        The steps that were taken and what each said; see `tensorspill.gds.probe_child`.
    failure : str
        Why it ended early, as the library put it; empty if it did not.
    hung : bool
        Whether it was ended at the time limit.
    """

    steps: Steps = field(default_factory=dict)
    failure: str = ""
    hung: bool = False

    def has(self, step: str) -> bool:
        """Whether a step was taken."""
        return step in self.steps

    def get(self, step: str, detail: str) -> Any:
        """Return what a step said about something, or None."""
        return self.steps.get(step, {}).get(detail)


def run(path: str, device: int, limit: float = LIMIT) -> Report:
    """Probe with one file and one GPU; never raises, and returns about when `limit` is over.

    Parameters
    ----------
    path : str
        An existing file that may be overwritten; empty to look at the libraries only.
    device : int
        Number of the GPU.
    limit : float
        Seconds.
    """
    if not sys.executable:
        return Report(failure="this process does not know its Python, which would run the probe")
    # -P: the folder of the script is no place to import from.
    command = [sys.executable, "-P", str(_SCRIPT), path, str(device)]
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
    except OSError as error:
        return Report(failure=f"the probe can't be started: {error}")
    try:
        output, complaint = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return _give_up(child, limit)
    except BaseException:
        child.kill()
        raise
    return _report(_steps(output), child.returncode, complaint)


def _give_up(child: subprocess.Popen[bytes], limit: float) -> Report:
    """End a child that hangs; one that the kernel holds is left to it."""
    child.kill()
    try:
        output, _ = child.communicate(timeout=2)
    except subprocess.TimeoutExpired:
        output = b""
    steps = _steps(output)
    last = next(reversed(steps), "its start")
    return Report(steps, f"the probe hung for {limit:g} s after the step {last!r}", hung=True)


def _steps(output: bytes) -> dict[str, dict[str, Any]]:
    steps = {}
    for line in output.decode(errors="replace").splitlines():
        try:
            said = json.loads(line)
            steps[str(said.pop("step"))] = said
        except (ValueError, KeyError, AttributeError, TypeError):
            continue  # some library's own output
    return steps


def _report(steps: dict[str, dict[str, Any]], code: int, complaint: bytes) -> Report:
    if "failed" in steps:
        return Report(steps, str(steps["failed"].get("error")))
    if "done" in steps:
        return Report(steps)
    last = next(reversed(steps), "its start")
    lines = complaint.decode(errors="replace").strip().splitlines()
    said = f": {lines[-1].strip()}" if lines else ""
    how = f"by signal {-code}" if code < 0 else f"with status {code}"
    return Report(steps, f"the probe ended {how} after the step {last!r}{said}")
