"""Transfers are ordered with the caller's stream, by streams of cuFile's or by waiting."""

import errno
from pathlib import Path

import numpy as np
import pytest

from tensorspill.engine import Engine, Request
from tensorspill.errors import BrokenError, EndOfFileError, UnsupportedError
from tensorspill.pool.cuda.streams import Stream
from tests.gds.inside.conftest import LANE
from tests.gds.inside.moving import content, fresh, gds, holds, host_path, poisoned, read, write
from tests.standin.arrays import DeviceArray, call
from tests.standin.control import cuda, cufile

SIZE = 1 << 20


def streamed(engine: Engine) -> int:
    return cufile().count("cuFileReadAsync") + cufile().count("cuFileWriteAsync")


def copy(target: DeviceArray, source: DeviceArray, stream: Stream) -> None:
    call("cuMemcpyDtoDAsync", target.address, source.address, source.nbytes, stream.handle)


@pytest.mark.parametrize("stream_ordered", ["no", "auto", "yes"])
def test_a_write_waits_for_what_fills_the_memory(tmp_path: Path, stream_ordered):
    source, data = fresh(SIZE)
    target = poisoned(SIZE)
    with (
        Stream(0) as stream,
        gds(tmp_path, stream_ordered=stream_ordered) as engine,
        engine.open("x", "w", size=SIZE) as file,
    ):
        with cuda().holding(stream.handle):
            copy(target, source, stream)
            transfer = engine.submit([Request(target, file, write=True)], stream=stream)
            with pytest.raises(TimeoutError):
                transfer.result(0.05)
        transfer.result(60)
        assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), data)


@pytest.mark.parametrize("stream_ordered", ["no", "yes"])
def test_a_stream_waits_for_a_read(tmp_path: Path, stream_ordered):
    data = content(SIZE)
    (tmp_path / "x").write_bytes(data.tobytes())
    target, after = poisoned(SIZE), DeviceArray(SIZE)
    with (
        Stream(0) as stream,
        gds(tmp_path, stream_ordered=stream_ordered) as engine,
        engine.open("x") as file,
    ):
        transfer = engine.submit([Request(target, file)], stream=stream)
        transfer.wait_on(stream)
        copy(after, target, stream)
        stream.synchronize()
        assert np.array_equal(after.load(), data)
        transfer.result(60)
    assert holds(target, data)


@pytest.mark.skipif(LANE == "real", reason="libcufile's compatibility mode waits for the whole GPU")
def test_a_batch_that_is_ready_overtakes_those_that_wait(tmp_path: Path):
    source, data = fresh(SIZE)
    spare = DeviceArray(SIZE)
    with Stream(0) as stream, gds(tmp_path, stream_ordered="no") as engine:
        with engine.open("x", "w", size=20 * SIZE) as file, cuda().holding(stream.handle):
            copy(spare, source, stream)
            waiting = [
                engine.submit([Request(source, file, i * SIZE, write=True)], stream=stream)
                for i in range(10)
            ]
            with Stream(0) as other:
                engine.submit([Request(source, file, 12 * SIZE, write=True)], stream=other).result(
                    60
                )
            assert not any(transfer.done() for transfer in waiting)
        for transfer in waiting:
            transfer.result(60)
    assert np.array_equal(np.fromfile(tmp_path / "x", "u1", SIZE, offset=12 * SIZE), data)


@pytest.mark.cufile
def test_streams_run_operations_where_the_callers_is_busy(tmp_path: Path):
    source, _ = fresh(SIZE)
    spare = DeviceArray(SIZE)
    with Stream(0) as stream, gds(tmp_path) as engine, engine.open("x", "w", size=SIZE) as file:
        before = streamed(engine)
        with cuda().holding(stream.handle):
            copy(spare, source, stream)
            transfer = engine.submit([Request(source, file, write=True)], stream=stream)
            assert streamed(engine) > before
        assert transfer.result(60).nbytes == SIZE


@pytest.mark.cufile
def test_work_on_the_default_stream_does_not_hold_up_others(tmp_path: Path):
    """kvikio waits for the default stream before each operation; streams of ours do not."""
    source, _ = fresh(SIZE)
    spare = DeviceArray(SIZE)
    with (
        Stream(0) as stream,
        gds(tmp_path) as engine,
        engine.open("x", "w", size=SIZE) as file,
        cuda().holding(0),
    ):
        call("cuMemcpyDtoDAsync", spare.address, source.address, SIZE, 0)
        engine.submit([Request(source, file, write=True)], stream=stream).result(60)


@pytest.mark.cufile
def test_unaligned_writes_do_not_go_on_streams(tmp_path: Path):
    source, _ = fresh(SIZE - 100)
    with (
        gds(tmp_path, stream_ordered="yes") as engine,
        engine.open("x", "w", size=SIZE) as file,
    ):
        before = streamed(engine)
        write(engine, file, source, 50)
        assert streamed(engine) == before
        read(engine, file, SIZE - 100, 50)
        assert streamed(engine) == before + 1


@pytest.mark.cufile
def test_a_library_that_refuses_streams(tmp_path: Path):
    """5038 in the middle: the rest is done without, and it is not tried again."""
    source, data = fresh(SIZE)
    with (
        gds(tmp_path, stream_ordered="yes", block_bytes=128 << 10) as engine,
        engine.open("x", "w", size=SIZE) as file,
    ):
        with cufile().failing("cuFileWriteAsync=5038@3"):
            assert engine.submit([Request(source, file, write=True)]).result().nbytes == SIZE
        assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), data)
        before = streamed(engine)
        assert np.array_equal(read(engine, file, SIZE), data)
        assert streamed(engine) == before
        assert any("5038" in note for note in engine.statistics().notes)


@pytest.mark.cufile
@pytest.mark.parametrize("rule", [f"errno:{errno.EIO}", "5030", "short:5000"])
def test_a_failure_on_a_stream_is_raised(tmp_path: Path, rule):
    """Another stream may have gone on with what was not read: too late to try another way."""
    data = content(SIZE)
    (tmp_path / "x").write_bytes(data.tobytes())
    with (
        gds(tmp_path, host_path(tmp_path), stream_ordered="yes") as engine,
        engine.open("x") as file,
    ):
        with cufile().failing(f"cuFileRead={rule},cuFileReadAsync={rule}x1"):
            transfer = engine.submit([Request(poisoned(SIZE), file)])
            try:
                outcome = transfer.exception(60)
            finally:
                cufile().rules("")
        assert isinstance(outcome, BrokenError) or transfer.result().by_path["host"] == SIZE
        assert np.array_equal(read(engine, file, SIZE), data)
        assert engine.statistics().in_flight == 0


@pytest.mark.cufile
def test_the_end_of_the_file_on_streams(tmp_path: Path):
    (tmp_path / "x").write_bytes(content(SIZE).tobytes())
    with (
        gds(tmp_path, stream_ordered="yes") as engine,
        engine.open("x") as file,
        pytest.raises(EndOfFileError),
    ):
        read(engine, file, SIZE, 1)


def test_a_stream_of_another_device(engine: Engine):
    with (
        Stream(1) as other,
        engine.open("x", "w", size=100) as file,
        pytest.raises(UnsupportedError),
    ):
        engine.submit([Request(poisoned(100), file)], stream=other)


@pytest.mark.skipif(LANE == "real", reason="libcufile itself makes a context on every GPU it sees")
def test_memory_of_another_device(engine: Engine):
    array = DeviceArray(4096, 1)
    with engine.open("x", "w", size=4096) as file:
        for request in (Request(array, file, write=True), Request(array, file)):
            with pytest.raises(UnsupportedError, match="cuda:1"):
                engine.submit([request])


def test_managed_and_scattered_memory(engine: Engine):
    managed = DeviceArray(4096, managed=True)
    scattered = DeviceArray(4096)[::2]
    with engine.open("x", "w", size=4096) as file:
        for array in (managed, scattered):
            with pytest.raises(UnsupportedError):
                engine.submit([Request(array, file, write=True)])
