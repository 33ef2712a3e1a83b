"""The order with the caller's streams, which hold nobody else up."""

import threading

import numpy as np
import pytest

from tensorspill.engine import Request
from tensorspill.errors import UnsupportedError
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import call
from tensorspill.pool.cuda.streams import Stream
from tests.host_fallback.device.helpers import Guarded, held_stream, open_staged, random_array
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda

SMALL = {"staging_block": 4096, "staging_bytes": 4 * 4096}


def fill(array: DeviceArray, value: int, stream: Stream) -> None:
    with current(0):
        call("cuMemsetD8Async", array.address, value, array.nbytes, stream.handle)


@pytest.mark.parametrize("nbytes", [100, 50_000])
def test_a_write_takes_what_the_stream_makes(tmp_path, nbytes):
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "w") as file:
        array, _ = random_array(nbytes)
        with held_stream() as stream:
            fill(array, 7, stream)
            transfer = engine.submit([Request(array, file, write=True)], stream=stream)
            with pytest.raises(TimeoutError):
                transfer.result(0.05)
        transfer.result()
    assert (tmp_path / "x").read_bytes() == b"\x07" * nbytes


@pytest.mark.parametrize("nbytes", [100, 50_000])
def test_a_read_comes_after_what_the_stream_does(tmp_path, nbytes):
    content = np.frombuffer(np.random.default_rng().bytes(nbytes), "u1")
    (tmp_path / "x").write_bytes(content.tobytes())
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x") as file:
        target = Guarded(nbytes)
        with held_stream() as stream:
            fill(target.array, 7, stream)
            transfer = engine.submit([Request(target.array, file)], stream=stream)
            with pytest.raises(TimeoutError):
                transfer.result(0.05)
        transfer.result()
        assert (target.content() == content).all()


def test_the_drive_is_read_while_the_stream_is_busy(tmp_path):
    (tmp_path / "x").write_bytes(bytes(4096))
    with open_staged(tmp_path) as engine, engine.open("x") as file:
        cuda().reset_counts()
        with held_stream() as stream:
            transfer = engine.submit([Request(DeviceArray(4096), file)], stream=stream)
            while not any(p.nbytes == 4096 for p in engine.statistics().by_path.values()):
                threading.Event().wait(0.001)
            assert not transfer.done()
            assert cuda().count("cuMemcpyAsync") == 0
        transfer.result()


@pytest.mark.parametrize("write", [True, False])
def test_a_stream_that_is_held_holds_nobody_up(tmp_path, write):
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    # Made first and kept: freeing memory waits for all streams of a device.
    source, content = random_array(100_000)
    arrays = [source, DeviceArray(100_000)]
    waiting_arrays = [DeviceArray(50_000) for _ in range(10)]
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "r+") as file:
        with held_stream() as stream:
            waiting = [
                engine.submit([Request(a, file, i * 50_000, write=write)], stream=stream)
                for i, a in enumerate(waiting_arrays)
            ]
            for array, direction in zip(arrays, (True, False), strict=True):
                engine.submit([Request(array, file, 600_000, write=direction)]).result(60)
            assert not any(transfer.done() for transfer in waiting)
        for transfer in waiting:
            transfer.result(60)
    assert (arrays[1].load() == content).all()


def test_a_stream_of_another_device(tmp_path):
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file, Stream(1) as other:
        array, _ = random_array(100)
        with pytest.raises(UnsupportedError, match="cuda:0"):
            engine.submit([Request(array, file, write=True)], stream=other)
        with pytest.raises(UnsupportedError, match="no CUDA stream"):
            engine.submit([Request(array, file, write=True)], stream="first")
        engine.submit([Request(array, file, write=True)], stream=0).result()
        statistics = engine.statistics()
    assert (statistics.transfers, statistics.in_flight) == (1, 0)


def test_waiting_on_a_stream(tmp_path):
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file, Stream(0) as stream:
        array, content = random_array(100_000)
        engine.submit([Request(array, file, write=True)]).wait_on(stream)
        target = Guarded(100_000)
        transfer = engine.submit([Request(target.array, file)])
        transfer.wait_on(stream)
        assert transfer.done()
        assert (target.content() == content).all()
        with pytest.raises(UnsupportedError):
            transfer.wait_on("stream")
        with pytest.raises(EOFError):
            engine.submit([Request(target.array, file, 50_000)]).wait_on(stream)


def test_streams_at_a_time(tmp_path):
    """Each thread's stream makes what it writes, and overwrites what it read, in order."""
    failures: list[BaseException] = []
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "w", 1 << 20) as file:

        def work(number: int) -> None:
            try:
                array, target = DeviceArray(30_001), DeviceArray(30_001)
                with Stream(0) as stream:
                    for turn in range(20):
                        value = (number * 20 + turn) % 251
                        fill(array, value, stream)
                        place = number * 40_000 + 17
                        engine.submit(
                            [Request(array, file, place, write=True)], stream=stream
                        ).wait_on(stream)
                        fill(array, 255, stream)
                        fill(target, 254, stream)
                        engine.submit([Request(target, file, place)], stream=stream).result(60)
                        assert (target.load() == value).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures
