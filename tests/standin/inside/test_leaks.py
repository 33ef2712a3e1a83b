"""Engines in a lane leave nothing behind: no registration, memory, stream, event or file."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tensorspill import open_engine
from tensorspill.engine import Request
from tensorspill.pool import BufferPool
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda, cufile
from tests.standin.inside.conftest import LANE

NBYTES = 1 << 17


@pytest.fixture(autouse=True)
def old_objects() -> Iterator[None]:
    """Leave what is there already out of the garbage collections, which would take most time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    cuda().reuse_addresses(False)


def held(backend: str) -> dict[str, int]:
    """Count what an engine may hold; kvikio keeps a stream for each of its threads."""
    gc.collect()
    names = ["allocations", "page-locked", "events"] + (["streams"] if backend == "aio" else [])
    found = {name: cuda().gauge(name) for name in names}
    if LANE == "cufile":
        names = ["registered buffers", "registered files", "pinned bytes"]
        found |= {name: cufile().gauge(name) for name in names}
    return found | {"descriptors": len(os.listdir("/proc/self/fd"))}


@pytest.mark.parametrize("backend", ["gds", "aio"])
def test_a_thousand_cycles_of_memory(tmp_path: Path, backend):
    """Each in new memory, at an address that was used before: nothing stale may be taken for it."""
    cuda().reuse_addresses(True)
    freed = cuda().gauge("freed while registered")
    if LANE == "cufile":
        cufile().reset_counts()
    with open_engine(tmp_path, "cuda:0", backend=backend) as warm, warm.open("x", "w") as file:
        warm.submit([Request(DeviceArray(NBYTES), file, write=True)]).result()
    before = held(backend)
    with (
        open_engine(tmp_path, "cuda:0", backend=backend) as engine,
        engine.open("x", "w", size=NBYTES) as file,
    ):
        for cycle in range(1000):
            source = DeviceArray(NBYTES + 512 * (cycle % 3))
            engine.submit([Request(source, file, nbytes=NBYTES, write=True)]).result()
            del source
        during = held(backend)
    assert held(backend) == before
    assert cuda().gauge("freed while registered") == freed
    assert during["allocations"] - before["allocations"] <= 1
    assert during["events"] - before["events"] < 100
    if LANE == "cufile" and backend == "gds":
        assert during["registered buffers"] <= 1
        made, undone = (cufile().count(f"cuFileBuf{what}ister") for what in ("Reg", "Dereg"))
        assert made == undone > 0


def test_a_pool_is_deregistered_before_it_is_freed(tmp_path: Path):
    freed = cuda().gauge("freed while registered")
    before = held("gds")
    with open_engine(tmp_path, "cuda:0", backend="gds") as engine, engine.open("x", "w") as file:
        for _ in range(20):
            with BufferPool(1 << 20, "cuda:0") as pool:
                buffers = [pool.allocate(NBYTES) for _ in range(4)]
                engine.submit(
                    [Request(b, file, i * NBYTES, write=True) for i, b in enumerate(buffers)]
                ).result()
                if LANE == "cufile":
                    assert cufile().gauge("registered buffers") == 1, "once for an allocation"
                del buffers
    assert cuda().gauge("freed while registered") == freed
    after = held("gds")
    if LANE != "compat":
        # cuFile keeps what it made for itself at its first use.
        for name in ("page-locked", "descriptors"):
            before.pop(name), after.pop(name)
    assert after == before


@pytest.mark.parametrize("backend", ["gds", "aio"])
def test_engines_opened_again_and_again(tmp_path: Path, backend):
    array = DeviceArray(NBYTES)
    counts = []
    for _ in range(30):
        with (
            open_engine(tmp_path, "cuda:0", backend=backend) as engine,
            engine.open("x", "w") as file,
        ):
            engine.submit([Request(array, file, write=True)]).result()
        counts.append(held(backend))
    assert counts[-1] == counts[4]
