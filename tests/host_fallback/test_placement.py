"""Threads and staging of an engine on the NUMA node that was asked for."""

import os
import threading
from pathlib import Path

import pytest
import torch

import tensorspill
from tensorspill.engine import Request
from tensorspill.errors import UnsupportedError

NODE = Path("/sys/devices/system/node/node0/cpulist")


def test_a_worker_runs_on_the_cpus_of_its_node(tmp_path: Path):
    if not NODE.exists():
        pytest.skip("this kernel shows no NUMA nodes")
    content = torch.arange(5000, dtype=torch.int16)
    with tensorspill.open_engine(tmp_path, numa_node=0) as engine, engine.open("x", "w") as file:
        engine.submit([Request(content, file, write=True)]).result()
        (worker,) = [t for t in threading.enumerate() if t.name.startswith("tensorspill-aio")]
        assert worker.native_id is not None
        cpus = os.sched_getaffinity(worker.native_id)
        assert engine.statistics().options["numa_node"] == (0, "argument")
        assert not [note for note in engine.statistics().notes if "not bound" in note]
    assert cpus <= _cpus(NODE.read_text())


def _cpus(text: str) -> set[int]:
    ranges = (part.split("-") for part in text.strip().split(","))
    return {
        cpu for first, *last in ranges for cpu in range(int(first), int((last or [first])[0]) + 1)
    }


def test_a_node_that_does_not_exist(tmp_path: Path):
    with pytest.raises(UnsupportedError, match="NUMA node 4711"):
        tensorspill.open_engine(tmp_path, numa_node=4711)
