"""The real kvikio, in every lane: no wrong byte, whatever the sizes and offsets."""

import os
import random
from pathlib import Path

import kvikio
import kvikio.defaults
import numpy as np
import pytest

from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda

SIZES = (1, 511, 4095, 4096, 4097, 16_383, 16_385, 65_539, 1 << 20, (1 << 20) + 17)
OFFSETS = (0, 1, 511, 4096, 4097, 123_457)
TASKS = (4096, 100_000, 1 << 22)


def fuzz(path: Path, count: int, seed: int) -> None:
    """Write and read ranges of a file and of a device array, and compare every byte of both."""
    choose = random.Random(seed)
    array = DeviceArray(2 << 20)
    for _ in range(count):
        nbytes, offset, at = choose.choice(SIZES), choose.choice(OFFSETS), choose.choice(OFFSETS)
        task = choose.choice(TASKS)
        expected = np.frombuffer(os.urandom(offset + nbytes + 5000), "u1").copy()
        expected.tofile(path)
        content = np.frombuffer(os.urandom(nbytes), "u1")
        expected[offset : offset + nbytes] = content
        part = array[at : at + nbytes]
        part.store(content)
        with kvikio.CuFile(path, "r+") as file:
            assert file.pwrite(part, file_offset=offset, task_size=task).get() == nbytes
        assert np.array_equal(np.fromfile(path, "u1"), expected)
        whole = np.full(len(array), 0xA5, "u1")
        array.store(whole)
        with kvikio.CuFile(path, "r") as file:
            assert file.pread(part, file_offset=offset, task_size=task).get() == nbytes
        whole[at : at + nbytes] = content
        assert np.array_equal(array.load(), whole)


@pytest.mark.parametrize("threads", [1, 8])
def test_no_wrong_byte(tmp_path: Path, threads):
    with kvikio.defaults.set({"num_threads": threads}):
        fuzz(tmp_path / "x", 60, threads)


def test_no_wrong_byte_when_copies_are_late(tmp_path: Path):
    with cuda().failing("cuMemcpy*=delay:500"):
        fuzz(tmp_path / "x", 15, 5)


def test_devices_other_than_the_current_one(tmp_path: Path):
    content = np.frombuffer(os.urandom(300_000), "u1")
    made = [cuda().gauge("contexts", device) for device in range(4)]
    array = DeviceArray(300_000, 1)
    array.store(content)
    with kvikio.CuFile(tmp_path / "x", "w") as file:
        assert file.pwrite(array).get() == 300_000
    assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), content)
    now = [cuda().gauge("contexts", device) for device in range(4)]
    assert now[2:] == made[2:], "no context on a device that nobody uses"
