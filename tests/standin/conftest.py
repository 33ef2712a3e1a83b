"""Tests in `inside` run in a process of a lane, which `test_lanes` starts."""

import os

import pytest

from tests.standin.child import LaneReport

collect_ignore = [] if "STANDIN_LANE" in os.environ else ["inside"]

_reports = pytest.StashKey[dict[str, LaneReport]]()


@pytest.fixture
def reports(request: pytest.FixtureRequest) -> dict[str, LaneReport]:
    """What runs in lanes came to, by the name of each, for the summary at the end."""
    return request.config.stash.setdefault(_reports, {})


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Say what ran in lanes and what did not, and why."""
    found = config.stash.get(_reports, {})
    if found:
        terminalreporter.section("lanes on the stand-ins")
    for name, report in found.items():
        terminalreporter.line(f"{name}: {report.summary()}")
