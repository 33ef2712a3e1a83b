"""What these tests share: lanes, a process left as it was found."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorspill.engine import Engine
from tests.gds.inside.moving import gds
from tests.standin import arrays, control

LANE = os.environ["STANDIN_LANE"]


@pytest.fixture(autouse=True)
def tidy() -> Iterator[None]:
    """No rule may be left in force, and nothing registered or freed too early."""
    arrays.use_device(0)
    yield
    control.cuda().rules("")
    assert control.cuda().gauge("freed in use") == 0
    assert control.cuda().gauge("freed while registered") == 0
    if LANE == "cufile":
        control.cufile().rules("")
        assert control.cufile().gauge("registered buffers") == 0
        assert control.cufile().gauge("registered files") == 0
        assert control.cufile().gauge("deregistered in use") == 0


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    with gds(tmp_path) as opened:
        yield opened


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of the stand-in for cuFile where it is not in use."""
    for item in items:
        if item.get_closest_marker("cufile") and LANE != "cufile":
            item.add_marker(pytest.mark.skip(reason="only in the lane cufile"))


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker."""
    config.addinivalue_line("markers", "cufile: needs the stand-in for cuFile")
