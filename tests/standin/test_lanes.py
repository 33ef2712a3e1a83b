"""The stand-ins, and the engines on them, in every lane."""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import LaneReport, run_pytest, stop_all
from tests.standin.lanes import LANES, Lane, lane
from tests.thorough import THOROUGH

#: Devices of every lane: more than any test uses.
DEVICES = {"STANDIN_CUDA_DEVICES": "4"}

#: In one lane the suite runs with copies that come late, so that it fails where one is not awaited.
LATE = {
    "STANDIN_CUDA_RULES": ",".join(
        f"cuMemcpy{kind}Async=delay:300" for kind in ("", "HtoD", "DtoH", "DtoD", "Batch")
    )
}

#: What a lane runs, and how many seconds that may take: many times what it does take. The longest
#: first, since as many run at a time as there are cores.
RUNS = {"conformance": ("tests/conformance", 900), "stand-ins": ("tests/standin/inside", 300)}
ORDER = ("cufile", "compat", "real")

#: In thorough runs, everything in each.
ALWAYS = [("conformance", "cufile")]
OTHERS = [(what, name) for what in RUNS for name in ORDER if (what, name) not in ALWAYS]


@pytest.fixture(scope="module")
def running() -> Iterator[dict[tuple[str, str], Future[LaneReport]]]:
    """All runs, begun at once: a lane waits more than it computes."""
    pool = ThreadPoolExecutor(min(len(LANES), len(os.sched_getaffinity(0))))
    runs = {}
    for what, name in ALWAYS + (OTHERS if THOROUGH in os.environ else []):
        folder, limit = RUNS[what]
        environment = DEVICES | (LATE if (what, name) == ("conformance", "compat") else {})
        try:
            runs[name, what] = pool.submit(_run, lane(name), folder, limit, environment)
        except UnavailableError:
            continue
    yield runs
    pool.shutdown(wait=False, cancel_futures=True)
    stop_all()


def _run(usable: Lane, folder: str, limit: float, environment: dict[str, str]) -> LaneReport:
    return run_pytest(usable, folder, timeout=limit, environment=environment)


@pytest.mark.parametrize(
    ("what", "name"),
    [*ALWAYS, *(pytest.param(*case, marks=pytest.mark.thorough) for case in OTHERS)],
)
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
