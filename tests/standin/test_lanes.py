"""The stand-ins, and the engines on them, in every lane."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import LaneReport, run_pytest, stop_all
from tests.standin.lanes import LANES, Lane, lane

#: Devices of every lane: more than any test uses.
DEVICES = {"STANDIN_CUDA_DEVICES": "4"}

#: What a lane runs, and how many seconds that may take: many times what it does take.
RUNS = {"stand-ins": ("tests/standin/inside", 300), "conformance": ("tests/conformance", 900)}


@pytest.fixture(scope="module")
def running() -> Iterator[dict[tuple[str, str], Future[LaneReport]]]:
    """All runs, begun at once: a lane waits more than it computes."""
    pool = ThreadPoolExecutor(min(len(LANES), len(os.sched_getaffinity(0))))
    runs = {}
    for name in LANES:
        try:
            usable = lane(name)
        except UnavailableError:
            continue
        for what, (folder, limit) in RUNS.items():
            runs[name, what] = pool.submit(_run, usable, folder, limit)
    yield runs
    pool.shutdown(wait=False, cancel_futures=True)
    stop_all()


def _run(usable: Lane, folder: str, limit: float) -> LaneReport:
    return run_pytest(usable, folder, timeout=limit, environment=DEVICES)


@pytest.mark.parametrize("name", LANES)
@pytest.mark.parametrize("what", RUNS)
def test_a_lane(running, reports: dict[str, LaneReport], what, name):
    try:
        lane(name)
    except UnavailableError as reason:
        pytest.skip(f"lane {name}: {reason}")
    report = running[name, what].result()
    reports[f"{what}, lane {name}"] = report
    assert not report.failed, report.ended.output
    assert report.ended.returncode == 0, report.ended
    assert report.passed > 30
