"""What the world does wrong ends in a typed error, and everything is usable afterwards."""

import errno
import os
import tempfile
from pathlib import Path

import pytest

from tensorspill.engine import Engine, Request
from tensorspill.errors import CapacityError, EndOfFileError, NoSpaceError, PermissionDeniedError
from tests.conformance.data import bytes_of, equal, poisoned, random_bytes, read, write
from tests.conformance.lanes import REAL_CUFILE, Lane
from tests.faults import another_user, file_size_limit, small_file_system


def usable(engine: Engine, name: str = "afterwards") -> bool:
    content = random_bytes(100_000, 3)
    with engine.open(name, "w") as file:
        write(engine, file, content)
        return equal(read(engine, file, 100_000), content)


@pytest.mark.parametrize("size", [0, 1, 511, 4096, 5000, 70_000])
def test_reading_past_the_end(engine: Engine, tmp_path: Path, size):
    (tmp_path / "x").write_bytes(os.urandom(size))
    with engine.open("x") as file:
        for offset, nbytes in ((0, size + 1), (size, 1), (size + 100_000, 4096)):
            with pytest.raises(EndOfFileError) as caught:
                engine.submit([Request(poisoned(nbytes), file, offset)]).result()
            error = caught.value
            assert error.path == str(tmp_path / "x")
            assert error.errno == errno.ENODATA
            assert error.offset is not None
            assert error.nbytes is not None
            assert offset <= error.offset < offset + nbytes
    assert usable(engine)


def test_a_file_truncated_behind_our_back(engine: Engine, tmp_path: Path):
    content = random_bytes(200_000)
    with engine.open("x", "w") as file:
        write(engine, file, content)
        os.truncate(tmp_path / "x", 100_000)
        with pytest.raises(EndOfFileError):
            read(engine, file, 200_000)
        assert equal(read(engine, file, 100_000), content[:100_000])
        write(engine, file, content[50_000:], 50_000)
        assert equal(read(engine, file, 200_000), content)


def test_one_bad_request_fails_its_batch_only(engine: Engine, tmp_path: Path):
    content = random_bytes(50_000)
    (tmp_path / "x").write_bytes(bytes_of(content))
    with engine.open("x") as file:
        good, bad = poisoned(50_000), poisoned(10_000)
        transfers = [
            engine.submit([Request(bad[:5000], file), Request(bad[5000:], file, 48_000)]),
            engine.submit([Request(good, file)]),
        ]
        with pytest.raises(EndOfFileError):
            transfers[0].result()
        transfers[1].result()
    assert equal(good, content)
    statistics = engine.statistics()
    assert (statistics.failures, statistics.transfers, statistics.in_flight) == (1, 2, 0)


#: Small file systems are tmpfs, which is on no block device.
on_any_file_system = pytest.mark.skipif(
    REAL_CUFILE, reason="the real cuFile serves file systems of block devices only"
)


@on_any_file_system
def test_a_full_disk_in_the_middle_of_a_batch(lane: Lane, tmp_path: Path):
    with small_file_system(tmp_path, 8 << 20) as folder, lane.open(folder) as engine:
        with engine.open("kept", "w") as file:
            kept = random_bytes(1 << 20)
            write(engine, file, kept)
        with engine.open("big", "w") as file:
            requests = [
                Request(random_bytes(1 << 20), file, i << 20, write=True) for i in range(16)
            ]
            with pytest.raises(NoSpaceError) as caught:
                engine.submit(requests).result()
            error = caught.value
            assert isinstance(error, OSError)
            assert isinstance(error, CapacityError)
            assert error.errno == errno.ENOSPC
            assert error.path == str(folder / "big")
            assert error.offset is not None
            assert error.nbytes
        engine.remove("big")
        with engine.open("kept") as file:
            assert equal(read(engine, file, 1 << 20), kept)
        assert usable(engine)


@on_any_file_system
def test_no_room_to_preallocate(lane: Lane, tmp_path: Path):
    with small_file_system(tmp_path, 8 << 20) as folder, lane.open(folder) as engine:
        with pytest.raises(NoSpaceError) as caught:
            engine.open("big", "w", size=64 << 20)
        assert caught.value.asked == 64 << 20
        assert caught.value.free is not None
        assert 0 < caught.value.free < 64 << 20
        assert not (folder / "big").exists()
        assert usable(engine)


def test_a_file_size_limit(lane: Lane, tmp_path: Path):
    with lane.open(tmp_path) as engine, engine.open("x", "w") as file:
        write(engine, file, random_bytes(10_000))
        with file_size_limit(100_000), pytest.raises(NoSpaceError) as caught:
            write(engine, file, random_bytes(500_000))
        assert caught.value.errno == errno.EFBIG
        assert usable(engine)


def test_a_folder_without_permission(lane: Lane):
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        with lane.open(folder) as engine, another_user(), pytest.raises(PermissionError) as caught:
            engine.open("x", "w")
        assert isinstance(caught.value, PermissionDeniedError)
        assert caught.value.errno == errno.EACCES
        assert caught.value.path == os.path.join(folder, "x")
