"""Running files of checks on the stand-in driver, each in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_pytest
from tests.standin.lanes import lane

__all__ = ["run_checks"]


def run_checks(
    file: Path, name: str = "compat", environment: Mapping[str, str] | None = None
) -> None:
    """Run a file of checks in a lane; fail with what it printed if any check does.

    Skips where the stand-ins can't be built.
    """
    try:
        where = lane(name)
    except UnavailableError as error:
        pytest.skip(str(error))
    report = run_pytest(
        where,
        "-W",
        "error",
        str(file),
        timeout=300,
        environment={"STANDIN_CUDA_DEVICES": "4"} | dict(environment or {}),
    )
    ended = report.ended
    assert ended.returncode == 0, f"{report.summary()}\n{ended.output}\n{ended.errors}"
    assert report.passed, "no check ran"
