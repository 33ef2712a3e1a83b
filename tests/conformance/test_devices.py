"""What is particular to GPU memory: which of it is refused, and the order with streams."""

import pytest
import torch

from tensorspill.engine import Engine, Request
from tensorspill.errors import SpillError, UnsupportedError
from tests.conformance.data import bytes_of, equal, poisoned, random_bytes, read, write
from tests.conformance.lanes import REAL_CUFILE, Lane
from tests.conformance.memory import MEMORY

standin = pytest.mark.skipif(
    not MEMORY.standin, reason="needs the stand-in driver, whose streams can be held"
)


@pytest.fixture
def file(engine: Engine):
    with engine.open("x", "w", size=10_000) as opened:
        write(engine, opened, random_bytes(10_000))
        yield opened


def test_host_memory(engine: Engine, file):
    for buffer in (torch.zeros(10), bytearray(10), torch.zeros(10).numpy()):
        with pytest.raises(UnsupportedError):
            engine.submit([Request(buffer, file)])


def test_a_device_that_does_not_exist(lane: Lane, tmp_path):
    with pytest.raises(UnsupportedError):
        lane.open(tmp_path, device="cuda:15")


@standin
def test_memory_of_another_device(engine: Engine, file):
    from tests.standin.arrays import DeviceArray

    with pytest.raises(UnsupportedError, match="cuda:1") as caught:
        engine.submit([Request(DeviceArray(100, 1), file, 7)])
    assert (caught.value.path, caught.value.offset) == (file.path, 7)


@standin
def test_freed_memory(engine: Engine, file):
    from tests.standin.arrays import DeviceArray

    array = DeviceArray(100)
    array.free()
    with pytest.raises(UnsupportedError):
        engine.submit([Request(array, file)])


@standin
def test_managed_memory(engine: Engine, file):
    from tests.standin.arrays import DeviceArray

    with pytest.raises(UnsupportedError, match="managed"):
        engine.submit([Request(DeviceArray(100, managed=True), file)])


@standin
def test_more_than_the_allocation_has(engine: Engine, file):
    from tests.standin.arrays import DeviceArray

    array = DeviceArray(100)
    array.nbytes = 101
    with pytest.raises(UnsupportedError):
        engine.submit([Request(array, file)])


@standin
def test_a_read_only_destination(engine: Engine, file):
    source = random_bytes(100)
    source.read_only = True
    with pytest.raises(UnsupportedError, match="read-only"):
        engine.submit([Request(source, file)])
    write(engine, file, source)
    assert equal(read(engine, file, 100), source)


@standin
@pytest.mark.skipif(REAL_CUFILE, reason="the real cuFile looks at every GPU")
def test_contexts_are_made_only_for_the_engine_s_device(engine: Engine, file):
    from tests.standin.control import cuda

    assert [cuda().gauge("contexts", device) for device in (0, 2, 3)] == [1, 0, 0]


@standin
@pytest.mark.parametrize("nbytes", [100, 300_000])
def test_a_write_waits_for_the_stream(engine: Engine, file, nbytes):
    from tests.standin.arrays import call, on_device
    from tests.standin.control import cuda

    content = random_bytes(nbytes)
    with on_device():
        stream = int(call("cuStreamCreate", 1))
        with cuda().holding(stream):
            call("cuMemsetD8Async", content.address, 7, nbytes, stream)
            transfer = engine.submit([Request(content, file, write=True)], stream=stream)
            with pytest.raises(TimeoutError):
                transfer.result(0.1)
        transfer.result()
        call("cuStreamDestroy", stream)
    assert bytes_of(read(engine, file, nbytes)) == b"\x07" * nbytes


@standin
@pytest.mark.parametrize("nbytes", [100, 300_000])
def test_a_read_waits_for_the_stream(engine: Engine, nbytes):
    from tests.standin.arrays import call, on_device
    from tests.standin.control import cuda

    expected, target = random_bytes(nbytes), random_bytes(nbytes)
    with engine.open("y", "w") as file, on_device():
        write(engine, file, expected)
        stream = int(call("cuStreamCreate", 1))
        with cuda().holding(stream):
            call("cuMemsetD8Async", target.address, 7, nbytes, stream)
            transfer = engine.submit([Request(target, file)], stream=stream)
            with pytest.raises(TimeoutError):
                transfer.result(0.1)
        transfer.result()
        call("cuStreamDestroy", stream)
    assert equal(target, expected)


@standin
def test_a_stream_waits_for_the_transfer(engine: Engine):
    from tests.standin.arrays import call, on_device

    expected, target, copy = random_bytes(300_000), poisoned(300_000), poisoned(300_000)
    with engine.open("y", "w") as file, on_device():
        write(engine, file, expected)
        stream = int(call("cuStreamCreate", 1))
        transfer = engine.submit([Request(target, file)])
        transfer.wait_on(stream)
        call("cuMemcpyDtoDAsync", copy.address, target.address, 300_000, stream)
        call("cuStreamSynchronize", stream)
        assert equal(copy, expected)
        transfer.result()
        call("cuStreamDestroy", stream)


@standin
def test_a_stream_of_another_device(engine: Engine, file):
    from tests.standin.arrays import call, on_device

    with on_device(1):
        stream = int(call("cuStreamCreate", 1))
    with pytest.raises(SpillError):
        engine.submit([Request(poisoned(100), file)], stream=stream)
    with on_device(1):
        call("cuStreamDestroy", stream)
    assert len(read(engine, file, 100)) == 100


@standin
def test_late_copies_move_the_right_bytes(engine: Engine):
    from tests.standin.control import cuda

    contents = [random_bytes(70_000 + i, i) for i in range(6)]
    with engine.open("y", "w") as file, cuda().failing("cuMemcpy*=delay:2000"):
        for i, content in enumerate(contents):
            write(engine, file, content, i * 80_001)
        for i, content in enumerate(contents):
            assert equal(read(engine, file, len(content), i * 80_001), content)
