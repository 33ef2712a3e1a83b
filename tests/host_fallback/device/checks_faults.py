"""What drives and drivers do wrong ends in a typed error; the engine goes on."""

import errno
import os
from concurrent.futures import CancelledError

import pytest

from tensorspill.engine import Engine, Request
from tensorspill.errors import (
    BrokenError,
    EndOfFileError,
    NoSpaceError,
    SpillError,
    UnsupportedError,
)
from tests.faults import small_file_system
from tests.host_fallback.device.helpers import Guarded, held_stream, open_staged, random_array
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda

SMALL = {"staging_block": 4096, "staging_bytes": 4 * 4096}
MIB = 1 << 20


def check_usable(engine: Engine) -> None:
    array, content = random_array(50_000)
    with engine.open("afterwards", "w") as file:
        engine.submit([Request(array, file, 5, write=True)]).result(60)
        target = Guarded(50_000)
        engine.submit([Request(target.array, file, 5)]).result(60)
    assert (target.content() == content).all()
    assert engine.statistics().in_flight == 0


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        ("cuMemcpyAsync=700", BrokenError),
        ("cuMemcpyAsync=1", UnsupportedError),
        ("cuMemcpyBatchAsync=700", BrokenError),
        ("cuMemcpyAsync=719@3", BrokenError),
        ("cuEventRecord=700@2", BrokenError),
    ],
)
def test_a_copy_that_fails(tmp_path, write, rule, kind):
    (tmp_path / "x").write_bytes(bytes(MIB))
    with open_staged(tmp_path, **SMALL) as engine:
        with engine.open("x", "r+") as file:
            check_usable(engine)
            cuda().reset_counts()
            arrays = [random_array(n)[0] for n in (100, 200, 60_000)]
            requests = [Request(a, file, i * 70_000, write=write) for i, a in enumerate(arrays)]
            with cuda().failing(rule), pytest.raises(SpillError) as caught:
                engine.submit(requests).result(60)
            assert type(caught.value) is kind
            assert "CUDA_ERROR" in str(caught.value)
        check_usable(engine)
        assert engine.statistics().failures == 1


def test_a_driver_that_has_no_batches_after_all(tmp_path):
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
        arrays = [random_array(1000) for _ in range(20)]
        requests = [Request(a, file, i * 1000, write=True) for i, (a, _) in enumerate(arrays)]
        with cuda().failing("cuMemcpyBatchAsync=801"):
            engine.submit(requests).result(60)
    assert (tmp_path / "x").read_bytes() == b"".join(c.tobytes() for _, c in arrays)


def test_the_end_of_the_file(tmp_path):
    (tmp_path / "x").write_bytes(os.urandom(100_000))
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x") as file:
        for offset, nbytes in ((0, 100_001), (99_000, 50_000), (200_000, 1)):
            with pytest.raises(EndOfFileError) as caught:
                engine.submit([Request(DeviceArray(nbytes), file, offset)]).result(60)
            assert caught.value.path == str(tmp_path / "x")
            assert offset <= (caught.value.offset or 0) < offset + nbytes
        check_usable(engine)


def test_a_full_disk(tmp_path):
    with small_file_system(tmp_path, 8 * MIB) as folder, open_staged(folder, **SMALL) as engine:
        with engine.open("big", "w") as file:
            array = DeviceArray(16 * MIB)
            with pytest.raises(NoSpaceError) as caught:
                engine.submit([Request(array, file, write=True)]).result(60)
            assert caught.value.errno == errno.ENOSPC
            statistics = engine.statistics()
            moved = sum(path.nbytes for path in statistics.by_path.values())
            assert moved < 16 * MIB, "the rest was not started"
        engine.remove("big")
        check_usable(engine)


def test_one_bad_request_fails_its_batch_only(tmp_path):
    (tmp_path / "x").write_bytes(os.urandom(50_000))
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x") as file:
        good = Guarded(50_000)
        transfers = [
            engine.submit([Request(DeviceArray(9000), file, 45_000)]),
            engine.submit([Request(good.array, file)]),
        ]
        with pytest.raises(EndOfFileError):
            transfers[0].result(60)
        transfers[1].result(60)
        assert good.content().tobytes() == (tmp_path / "x").read_bytes()


@pytest.mark.parametrize("write", [True, False])
def test_cancelling(tmp_path, write):
    (tmp_path / "x").write_bytes(bytes(MIB))
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "r+") as file:
        with held_stream() as stream:
            array = DeviceArray(MIB)
            transfer = engine.submit([Request(array, file, write=write)], stream=stream)
            assert transfer.cancel()
            with pytest.raises(CancelledError):
                transfer.result(60)
            assert transfer.cancelled()
            assert not transfer.cancel()
        assert engine.statistics().cancelled == 1
        check_usable(engine)


def test_bad_memory(tmp_path):
    with open_staged(tmp_path) as engine, engine.open("x", "w", 4096) as file:
        freed, read_only = DeviceArray(100), DeviceArray(100)
        freed.free()
        read_only.read_only = True
        strided = DeviceArray(100)[::2]
        for bad in (
            freed,
            read_only,
            strided,
            DeviceArray(100, 1),
            DeviceArray(100, managed=True),
            bytearray(100),
            b"1",
            object(),
        ):
            with pytest.raises(UnsupportedError) as caught:
                engine.submit([Request(bad, file, 3)])
            assert (caught.value.path, caught.value.offset) == (file.path, 3)
        assert engine.statistics().transfers == 0
        check_usable(engine)


def test_memory_that_can_not_be_page_locked(tmp_path):
    with open_staged(tmp_path, **SMALL) as engine:
        with cuda().failing("cuMemHostRegister=801"):
            check_usable(engine)
        assert any("Not page-locked" in note for note in engine.statistics().notes)


def test_no_stream_to_be_had(tmp_path):
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "w") as file:
        with cuda().failing("cuStreamCreate=2"), pytest.raises(SpillError, match="OUT_OF_MEMORY"):
            engine.submit([Request(DeviceArray(10), file, write=True)]).result(60)
        check_usable(engine)


@pytest.mark.parametrize("device", ["cuda:9", "cuda:4"])
def test_no_such_gpu(tmp_path, device):
    import tensorspill

    with pytest.raises(UnsupportedError, match=device):
        tensorspill.open_engine(tmp_path, device, backend="aio")
