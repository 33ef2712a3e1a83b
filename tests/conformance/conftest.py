import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorspill.engine import Engine
from tests.conformance.lanes import LANES, Lane
from tests.conformance.memory import LANE_VARIABLE, MEMORY

#: Engines, and lanes of the stand-ins, on which tests marked costly always run.
MAIN = {"aio"} if MEMORY.device == "cpu" else {"gds"}
MAIN_LANES = {None, "cufile"}

collect_ignore = ["test_devices.py", "test_fuzz.py"] if MEMORY.device == "cpu" else []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave costly tests on further settings of an engine to thorough runs."""
    for item in items:
        if item.get_closest_marker("costly") and isinstance(item, pytest.Function):
            engine = item.callspec.params["lane"]
            assert isinstance(engine, Lane)
            if engine.name not in MAIN or os.environ.get(LANE_VARIABLE) not in MAIN_LANES:
                item.add_marker(pytest.mark.thorough)


@pytest.fixture(params=LANES, ids=lambda lane: lane.name)
def lane(request: pytest.FixtureRequest) -> Lane:
    found: Lane = request.param
    return found


@pytest.fixture
def engine(lane: Lane, tmp_path: Path) -> Iterator[Engine]:
    with lane.open(tmp_path) as opened:
        yield opened


@pytest.fixture(scope="module", params=LANES, ids=lambda lane: lane.name)
def shared_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine for all examples of a property: these do not disturb one another."""
    with request.param.open(tmp_path_factory.mktemp("drive")) as opened:
        yield opened
