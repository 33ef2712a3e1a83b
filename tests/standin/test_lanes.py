"""The stand-ins, and the engines on them, in every lane."""

import os

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_pytest
from tests.standin.lanes import LANES, Lane, lane


@pytest.fixture(params=LANES)
def each_lane(request: pytest.FixtureRequest) -> Lane:
    return usable(request.param)


def usable(name: str) -> Lane:
    """Return a lane, or skip saying why there is none."""
    try:
        return lane(name)
    except UnavailableError as reason:
        pytest.skip(f"lane {name}: {reason}")


def test_the_stand_ins(each_lane: Lane):
    folder = os.path.join(os.path.dirname(__file__), "inside")
    report = run_pytest(each_lane, folder, environment={"STANDIN_CUDA_DEVICES": "4"})
    assert not report.failed, report.ended.output
    assert report.ended.returncode == 0, report.ended
    assert report.passed > 30
