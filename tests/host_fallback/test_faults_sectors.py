"""Drives with sectors of 4096 bytes: every misalignment, against a model of the file."""

import errno
import itertools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tensorspill
from tensorspill.engine import Request
from tensorspill.host_fallback.alignment import find_alignment
from tests.conformance.data import guards_intact, poisoned, random_bytes, read, write
from tests.faults import small_file_system, usable

SECTOR = 4096
SIZE = 400_000
SHIFTS = (0, 1, 64, 511, 512, 1024, 2048, 4095)
OFFSETS = (0, 1, 511, 512, 1024, 4095, 4096, 5000, 8192)
SIZES = (1, 511, 512, 1024, 4095, 4096, 4097, 20_000, 150_000)


@pytest.fixture(scope="module")
def drive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with small_file_system(tmp_path_factory.mktemp("sectors"), 32 << 20, SECTOR) as folder:
        yield folder


def test_the_drive_refuses_less_than_a_sector(drive: Path):
    """Else the other tests here would show nothing."""
    memory = random_bytes(SECTOR)
    fd = os.open(drive / "x", os.O_CREAT | os.O_RDWR | os.O_DIRECT, 0o600)
    try:
        for offset, nbytes in ((0, 512), (512, SECTOR), (1024, 1024)):
            with pytest.raises(OSError, match="Invalid argument") as caught:
                os.pwrite(fd, memory[:nbytes].numpy().data, offset)
            assert caught.value.errno == errno.EINVAL
        alignment = find_alignment(fd)
        assert alignment is not None
        assert (alignment.offset, alignment.source) == (SECTOR, "statx")
    finally:
        os.close(fd)
        os.unlink(drive / "x")


@pytest.mark.parametrize("exclusive", [False, True])
@pytest.mark.parametrize(("block", "depth"), [(1 << 20, 32), (SECTOR, 3)])
def test_every_misalignment(drive: Path, block, depth, exclusive):
    model = random_bytes(SIZE)
    # Each run takes others, in another order.
    cases = random.sample(list(itertools.product(SHIFTS, OFFSETS, SIZES)), 100)
    with tensorspill.open_engine(drive, block_bytes=block, depth=depth) as engine:
        with engine.open("x", "w", size=SIZE) as file:
            write(engine, file, model)
            file.exclusive = exclusive
            for shift, near, nbytes in cases:
                offset = near + 40_960
                content = random_bytes(nbytes, shift)
                write(engine, file, content, offset)
                model[offset : offset + nbytes] = content
                if exclusive:
                    _pad(model, offset, nbytes)
                target = poisoned(nbytes, SHIFTS[-1] - shift)
                engine.submit([Request(target, file, offset)]).result()
                assert torch.equal(target, content), (shift, offset, nbytes)
                assert guards_intact(target)
            assert torch.equal(read(engine, file, SIZE), model)
        by_path = engine.statistics().by_path
        # The kernel was never asked for what the drive refuses, and the bulk went past the cache.
        assert "refused" not in by_path
        assert by_path["direct"].nbytes > 0
        assert by_path["staged"].nbytes > 0
        assert usable(engine)
        engine.remove("x")


def _pad(model: torch.Tensor, offset: int, nbytes: int) -> None:
    """Zero the rest of the blocks of a write, as an exclusive file may have it."""
    model[offset - offset % SECTOR : offset] = 0
    end = offset + nbytes
    model[end : end + -end % SECTOR] = 0


@pytest.mark.parametrize("nbytes", [512, 1024, 4096 - 512, 4096 + 1024, (1 << 20) + 1024])
def test_files_that_end_in_mid_sector(drive: Path, nbytes):
    """Such a tail was lost, or ended the process, where 1024 bytes were taken for aligned."""
    content = random_bytes(nbytes, 1024)
    with tensorspill.open_engine(drive) as engine:
        with engine.open("x", "w") as file:
            write(engine, file, content)
            assert file.size == nbytes
            assert torch.equal(read(engine, file, nbytes), content)
        assert (drive / "x").read_bytes() == content.numpy().tobytes()
        assert "refused" not in engine.statistics().by_path
        engine.remove("x")
