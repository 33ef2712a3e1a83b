"""Engines opened and closed again and again leave nothing behind."""

import gc
import resource
import threading
from pathlib import Path

import pytest
import torch

import tensorspill
from tensorspill.engine import Request
from tensorspill.errors import EndOfFileError
from tensorspill.pool.live import live_ranges
from tests.conformance.data import poisoned, random_bytes
from tests.faults import descriptors, in_child

MIB = 1 << 20


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _mapped() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _aio_contexts() -> int:
    """Return how many contexts this process has: each maps the ring of its events."""
    return Path("/proc/self/maps").read_text().count("/[aio]")


@pytest.mark.parametrize(("ending", "cycles"), [("close", 200), ("failure", 50), ("collected", 50)])
def test_opening_and_closing_again_and_again(tmp_path: Path, ending, cycles):
    def work() -> None:
        contents = [random_bytes(20_000, 0), random_bytes(20_000, 3)]
        for _ in range(20):
            _cycle(tmp_path, contents, ending)
        gc.collect()
        before = descriptors(), threading.active_count(), _aio_contexts()
        resident, mapped = _resident(), _mapped()
        for _ in range(cycles):
            _cycle(tmp_path, contents, ending)
        gc.collect()
        # An engine that was collected in its own thread ends in another, a moment later.
        assert descriptors() - before[0] < 8
        assert threading.active_count() - before[1] < 4
        assert _aio_contexts() - before[2] < 4
        assert _resident() - resident < 8 * MIB
        assert _mapped() - mapped < 64 * MIB
        assert not live_ranges.overlap(contents[0].data_ptr(), 20_000)

    in_child(work, 120)


def _cycle(folder: Path, contents: list[torch.Tensor], ending: str) -> None:
    engine = tensorspill.open_engine(folder)
    file = engine.open("x", "w")
    writes = [Request(c, file, i * 20_000, write=True) for i, c in enumerate(contents)]
    engine.submit(writes).result()
    if ending == "failure":
        with pytest.raises(EndOfFileError):
            engine.submit([Request(poisoned(10), file, 100_000)]).result()
    if ending != "collected":
        engine.close()
