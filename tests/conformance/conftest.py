from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorspill.engine import Engine
from tests.conformance.lanes import LANES, Lane
from tests.conformance.memory import MEMORY

collect_ignore = ["test_devices.py", "test_fuzz.py"] if MEMORY.device == "cpu" else []


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
