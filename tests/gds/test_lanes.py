"""The engine on the stand-in driver, in every lane: see `inside`."""

import os

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_pytest
from tests.standin.lanes import LANES, lane


@pytest.mark.parametrize("name", LANES)
def test_the_engine(name: str):
    try:
        chosen = lane(name)
    except UnavailableError as reason:
        pytest.skip(f"lane {name}: {reason}")
    folder = os.path.join(os.path.dirname(__file__), "inside")
    report = run_pytest(chosen, folder, environment={"STANDIN_CUDA_DEVICES": "4"}, timeout=300)
    assert not report.failed, report.ended.output
    assert report.ended.returncode == 0, report.ended
    assert report.passed > 20
