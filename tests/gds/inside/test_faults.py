"""What cuFile does wrong ends in the right error, or in a recorded fallback to the host path."""

import errno
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tensorspill.engine import Request
from tensorspill.errors import (
    BrokenError,
    EndOfFileError,
    NoSpaceError,
    SpillError,
    UnsupportedError,
)
from tensorspill.gds.codes import BY_CODE
from tests.gds.inside import moving
from tests.gds.inside.moving import content, fresh, holds, host_path, poisoned, read, write
from tests.standin.control import cufile

pytestmark = pytest.mark.cufile

SIZE = 300_000

#: Codes that the tracker's reports are about, and others of the table that files can meet.
OPENING = (5001, 5004, 5008, 5020, 5027, 5028, 5030, 5033, 5034, 5038)
MOVING = (5008, 5010, 5015, 5027, 5030, 5036, 5043, 5044)


#: What streams run is another function of cuFile's; `test_streams` has its failures.
gds = partial(moving.gds, stream_ordered="no")


def usable(engine) -> bool:
    array, data = fresh(SIZE)
    with engine.open("afterwards", "w") as file:
        write(engine, file, array)
        same = np.array_equal(read(engine, file, SIZE), data)
    engine.remove("afterwards")
    return same and engine.statistics().in_flight == 0


@pytest.mark.parametrize("code", OPENING)
def test_a_file_that_cufile_refuses(tmp_path: Path, code):
    with gds(tmp_path) as engine:
        with (
            cufile().failing(f"cuFileHandleRegister={code}"),
            pytest.raises(BrokenError) as caught,
        ):
            engine.open("x", "w", size=SIZE)
        error = pickle.loads(pickle.dumps(caught.value))
        assert error.cufile_code == code
        assert error.remedy == BY_CODE[code].remedy
        assert error.path == str(tmp_path / "x")
        assert str(code) in str(error)
        assert not (tmp_path / "x").exists(), "a file that the call made is removed again"
        assert usable(engine)


@pytest.mark.parametrize("code", OPENING)
def test_a_file_that_cufile_refuses_goes_by_the_host_path(tmp_path: Path, code):
    """kvikio#283, #508: opening in a container works, and why it is slow is recorded."""
    array, data = fresh(SIZE)
    with gds(tmp_path, host_path(tmp_path)) as engine:
        with cufile().failing(f"cuFileHandleRegister={code}"):
            file = engine.open("x", "w", size=SIZE)
        calls = cufile().count("cuFileWrite")
        write(engine, file, array)
        assert np.array_equal(read(engine, file, SIZE), data)
        assert cufile().count("cuFileWrite") == calls
        statistics = engine.statistics()
        assert set(statistics.by_path) == {"host"}
        assert str(code) in statistics.by_path["host"].why
        assert statistics.fallbacks == 1
        assert sum(str(code) in note for note in statistics.notes) == 1
        assert usable(engine), "other files are not concerned"


@pytest.mark.parametrize("write_", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("code", MOVING)
def test_an_operation_that_cufile_fails(tmp_path: Path, code, write_):
    (tmp_path / "x").write_bytes(content(SIZE).tobytes())
    function = "cuFileWrite" if write_ else "cuFileRead"
    with gds(tmp_path, block_bytes=65_536, depth=1) as engine, engine.open("x", "r+") as file:
        with cufile().failing(f"{function}={code}@3"), pytest.raises(BrokenError) as caught:
            engine.submit([Request(poisoned(SIZE), file, write=write_)]).result()
        error = caught.value
        assert error.cufile_code == code
        assert error.remedy == BY_CODE[code].remedy
        assert error.path == str(tmp_path / "x")
        assert error.offset == 2 * 65_536
        assert error.nbytes == 65_536
        statistics = engine.statistics()
        assert (statistics.failures, statistics.fallbacks) == (1, 0)
        assert usable(engine)


@pytest.mark.parametrize("code", MOVING)
@pytest.mark.parametrize("write_", [False, True], ids=["read", "write"])
def test_an_operation_that_cufile_fails_is_done_by_the_host_path(tmp_path: Path, code, write_):
    function = "cuFileWrite" if write_ else "cuFileRead"
    data = content(SIZE)
    (tmp_path / "x").write_bytes(content(SIZE).tobytes() if write_ else data.tobytes())
    with gds(tmp_path, host_path(tmp_path), block_bytes=65_536) as engine:
        file = engine.open("x", "r+")
        array = poisoned(SIZE)
        if write_:
            array.store(data)
        with cufile().failing(f"{function}={code}@3"):
            record = engine.submit([Request(array, file, write=write_)]).result()
            assert record.nbytes == sum(record.by_path.values()) == SIZE
            assert 0 < record.by_path["host"] < SIZE
            again = engine.submit([Request(array, file, write=write_)]).result()
        assert dict(again.by_path) == {"host": SIZE}
        assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), data)
        assert holds(array, data)
        statistics = engine.statistics()
        assert (statistics.failures, statistics.fallbacks) == (0, 1)
        assert sum(path.nbytes for path in statistics.by_path.values()) == 2 * SIZE


def test_the_drive_is_full(tmp_path: Path):
    """The host path would find it full as well, so that nothing falls back."""
    for host in (None, host_path(tmp_path)):
        with gds(tmp_path, host) as engine, engine.open("x", "w", size=SIZE) as file:
            with (
                cufile().failing(f"cuFileWrite=errno:{errno.ENOSPC}"),
                pytest.raises(NoSpaceError) as caught,
            ):
                write(engine, file, fresh(SIZE)[0])
            assert caught.value.errno == errno.ENOSPC
            assert engine.statistics().fallbacks == 0
            assert usable(engine)


def test_a_drive_that_can_not_write(tmp_path: Path):
    with gds(tmp_path, host_path(tmp_path)) as engine, engine.open("x", "w", size=SIZE) as file:
        with (
            cufile().failing(f"cuFileWrite=errno:{errno.EIO}"),
            pytest.raises(BrokenError) as caught,
        ):
            write(engine, file, fresh(SIZE)[0])
        assert caught.value.errno == errno.EIO
        assert engine.statistics().fallbacks == 0


def test_a_read_whose_errno_kvikio_loses(tmp_path: Path):
    """It decodes -1 as errno 1; the host path finds out what it was."""
    (tmp_path / "x").write_bytes(content(SIZE).tobytes())
    with cufile().failing(f"cuFileRead=errno:{errno.EIO}"):
        with (
            gds(tmp_path) as engine,
            engine.open("x") as file,
            pytest.raises(BrokenError) as caught,
        ):
            read(engine, file, SIZE)
        assert not isinstance(caught.value, PermissionError)
        assert "does not pass on" in str(caught.value)
        with gds(tmp_path, host_path(tmp_path)) as engine, engine.open("x") as file:
            assert np.array_equal(read(engine, file, SIZE), np.fromfile(tmp_path / "x", "u1"))
            assert engine.statistics().fallbacks == 1


@pytest.mark.parametrize("function", ["cuFileRead", "cuFileWrite"])
def test_a_short_operation_is_no_success(tmp_path: Path, function):
    """pytorch#178710, cucim#1110: a partial operation is an error, or done again."""
    data = content(SIZE)
    (tmp_path / "x").write_bytes(data.tobytes())
    with cufile().failing(f"{function}=short:5000"):
        with gds(tmp_path) as engine, engine.open("x", "r+") as file:
            request = Request(poisoned(SIZE), file, write=function == "cuFileWrite")
            with pytest.raises(BrokenError, match="5000 of") as caught:
                engine.submit([request]).result()
            assert not isinstance(caught.value, EndOfFileError)
        (tmp_path / "x").write_bytes(data.tobytes())
        with gds(tmp_path, host_path(tmp_path)) as engine, engine.open("x", "r+") as file:
            array = poisoned(SIZE)
            array.store(data)
            request = Request(array, file, write=function == "cuFileWrite")
            assert engine.submit([request]).result().nbytes == SIZE
            assert holds(array, data)
            assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), data)


def test_one_request_of_eight_fails(tmp_path: Path):
    """nixl#2146: a failed entry of a batch fails the batch, and nothing else."""
    parts = [fresh(32 << 10) for _ in range(8)]
    with gds(tmp_path, depth=1) as engine, engine.open("x", "w", size=1 << 20) as file:
        with cufile().failing("cuFileWrite=5030@3x1"), pytest.raises(BrokenError) as caught:
            engine.submit(
                [Request(a, file, i << 16, write=True) for i, (a, _) in enumerate(parts)]
            ).result()
        assert caught.value.offset == 2 << 16
        assert usable(engine)


def test_the_first_error_stops_the_rest(tmp_path: Path):
    (tmp_path / "x").write_bytes(content(4 << 20).tobytes())
    with gds(tmp_path, block_bytes=16 << 10, depth=2) as engine, engine.open("x") as file:
        before = cufile().count("cuFileRead")
        with cufile().failing("cuFileRead=5030"), pytest.raises(BrokenError):
            read(engine, file, 4 << 20)
        assert cufile().count("cuFileRead") - before < 16


def test_memory_is_used_until_the_last_operation_has_ended(tmp_path: Path):
    """kvikio#979, and futures that own nothing: an early error must not let memory go early."""
    (tmp_path / "x").write_bytes(content(4 << 20).tobytes())
    with gds(tmp_path, block_bytes=256 << 10, threads=4) as engine, engine.open("x") as file:
        for _ in range(5):
            array = poisoned(4 << 20)
            with (
                cufile().failing("cuFileRead=5030x1,cuFileRead=delay:2000"),
                pytest.raises(SpillError),
            ):
                engine.submit([Request(array, file)]).result()
            after = array.load()
            # The stand-in counts what is freed in use; what comes later would change the bytes.
            assert np.array_equal(array.load(), after)
            array.free()


@pytest.mark.parametrize("code", [5023, 5036, 5045])
def test_memory_that_can_not_be_registered(tmp_path: Path, code):
    """Transfers go through cuFile's own buffers then."""
    array, data = fresh(1 << 20)
    with (
        cufile().failing(f"cuFileBufRegister={code}"),
        gds(tmp_path) as engine,
        engine.open("x", "w", size=1 << 20) as file,
    ):
        write(engine, file, array)
        assert set(engine.statistics().by_path) == {"bounce"}
        assert np.array_equal(read(engine, file, 1 << 20), data)


def test_the_end_of_the_file_comes_before_everything(tmp_path: Path):
    (tmp_path / "x").write_bytes(content(SIZE).tobytes())
    with gds(tmp_path, host_path(tmp_path)) as engine, engine.open("x") as file:
        before = cufile().count("cuFileRead")
        for nbytes, offset in ((SIZE + 1, 0), (100, SIZE), (20_000, SIZE - 10_000)):
            first, second = poisoned(4096), poisoned(nbytes)
            with pytest.raises(EndOfFileError) as caught:
                engine.submit([Request(first, file), Request(second, file, offset)]).result()
            assert caught.value.errno == errno.ENODATA
            assert holds(first, np.full(4096, 0xA5, "u1"))
        assert cufile().count("cuFileRead") == before
        assert engine.statistics().fallbacks == 0


def test_a_file_that_was_replaced_does_not_fall_back(tmp_path: Path):
    """Another file may have the name by then; its bytes are not these."""
    (tmp_path / "x").write_bytes(content(SIZE).tobytes())
    with gds(tmp_path, host_path(tmp_path)) as engine, engine.open("x") as file:
        (tmp_path / "x").unlink()
        (tmp_path / "x").write_bytes(content(SIZE).tobytes())
        with cufile().failing("cuFileRead=5030"), pytest.raises(BrokenError) as caught:
            read(engine, file, SIZE)
        assert caught.value.cufile_code == 5030
        (tmp_path / "x").unlink()
        with cufile().failing("cuFileRead=5030"), pytest.raises(BrokenError):
            read(engine, file, SIZE)


def test_freed_memory(tmp_path: Path):
    with gds(tmp_path) as engine, engine.open("x", "w", size=1 << 20) as file:
        array, _ = fresh(1 << 20)
        view = array[:]
        array.free()
        with pytest.raises(UnsupportedError):
            engine.submit([Request(view, file, write=True)])
        batch_memory, _ = fresh(1 << 20)
        batch = engine.prepare([Request(batch_memory, file, write=True)])
        batch_memory.free()
        with pytest.raises(SpillError):
            engine.submit(batch).result(30)
        assert usable(engine)
