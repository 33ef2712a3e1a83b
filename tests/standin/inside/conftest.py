"""What these tests share: a current context, and a process left as it was found."""

import os
from collections.abc import Iterator

import pytest

from tests.standin import arrays, control

LANE = os.environ["STANDIN_LANE"]


@pytest.fixture(autouse=True)
def context() -> Iterator[None]:
    """Make device 0's context current; no memory may be left behind."""
    arrays.use_device(0)
    before = [control.cuda().gauge(name) for name in ("allocations", "events")]
    yield
    assert [control.cuda().gauge(name) for name in ("allocations", "events")] == before
    assert control.cuda().gauge("freed in use") == 0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of the stand-in for cuFile where it is not in use."""
    for item in items:
        if item.get_closest_marker("cufile") and LANE != "cufile":
            item.add_marker(pytest.mark.skip(reason="only in the lane cufile"))


def pytest_configure(config: pytest.Config) -> None:
    """Know the marker."""
    config.addinivalue_line("markers", "cufile: needs the stand-in for cuFile")
