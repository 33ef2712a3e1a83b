"""A spill file on a drive that fails, fills up, does not answer, or is gone."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorspill import SpillFile
from tensorspill.errors import BrokenError, CorruptError, NoSpaceError
from tests.conformance.data import random_bytes
from tests.faults import FaultyFileSystem, Rule, faulty_file_system

NBYTES = 300_000


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[FaultyFileSystem]:
    with faulty_file_system(tmp_path) as files:
        yield files


def get(spill: SpillFile, name: str) -> torch.Tensor:
    target = torch.zeros(NBYTES, dtype=torch.uint8)
    spill.get({name: target}).result(30)
    return target


def test_a_failed_put_leaves_the_old_value(drive: FaultyFileSystem):
    old, new = random_bytes(NBYTES), random_bytes(NBYTES)
    with SpillFile(drive.folder, capacity=8 << 20) as spill:
        spill.put({"a": old}).result(30)
        for code in (errno.EIO, errno.ENOSPC):
            drive.rules(Rule("*.spill", "write", error=code))
            with pytest.raises(BrokenError) as caught:
                spill.put({"a": new, "b": new}).result(30)
            assert caught.value.errno == code
            assert caught.value.path is not None
            assert caught.value.path.endswith(".spill")
            drive.rules()
            assert torch.equal(get(spill, "a"), old)
            assert "b" not in spill
        spill.put({"a": new}).result(30)
        assert torch.equal(get(spill, "a"), new)


def test_a_failed_get_loses_nothing(drive: FaultyFileSystem):
    content = random_bytes(NBYTES)
    with SpillFile(drive.folder, capacity=8 << 20) as spill:
        spill.put({"a": content}).result(30)
        drive.rules(Rule("*.spill", "read", error=errno.EIO))
        with pytest.raises(BrokenError) as caught:
            get(spill, "a")
        assert caught.value.errno == errno.EIO
        drive.rules()
        assert torch.equal(get(spill, "a"), content)


def test_growing_on_a_full_drive(drive: FaultyFileSystem):
    content = random_bytes(NBYTES)
    with SpillFile(drive.folder) as spill:
        spill.put({"a": content}).result(30)
        drive.rules(Rule("*.spill", "fallocate", error=errno.ENOSPC))
        with pytest.raises(NoSpaceError):
            spill.put({"big": torch.zeros(1 << 30, dtype=torch.uint8)}).result(30)
        assert "big" not in spill
        drive.rules()
        assert torch.equal(get(spill, "a"), content)


def test_bytes_that_changed_on_the_drive(drive: FaultyFileSystem):
    content = random_bytes(NBYTES)
    with SpillFile(drive.folder, capacity=8 << 20, verify=True) as spill:
        spill.put({"a": content, "b": content}).result(30)
        path, offset, _ = spill.location("a")[0]
        with (drive.behind / Path(path).relative_to(drive.folder)).open("r+b") as file:
            file.seek(offset + 100_000)
            byte = file.read(1)[0]
            file.seek(offset + 100_000)
            file.write(bytes([byte ^ 4]))
        with pytest.raises(CorruptError, match="a"):
            get(spill, "a")
        assert torch.equal(get(spill, "b"), content)


def test_a_drive_that_does_not_answer_and_then_is_gone(drive: FaultyFileSystem, tmp_path: Path):
    content = random_bytes(NBYTES)
    spill = SpillFile(drive.folder, capacity=8 << 20)
    spill.put({"a": content}).result(30)
    drive.rules(Rule("*.spill", "read", stall=True))
    waiting = spill.get({"a": torch.zeros(NBYTES, dtype=torch.uint8)})
    drive.wait_for_stall()
    with pytest.raises(TimeoutError):
        waiting.result(0.05)
    drive.kill()
    with pytest.raises(BrokenError):
        waiting.result(30)
    with pytest.raises(BrokenError):
        get(spill, "a")
    spill.close()
    with SpillFile(tmp_path / "elsewhere") as other:
        other.put({"a": content}).result(30)
        assert torch.equal(get(other, "a"), content)
