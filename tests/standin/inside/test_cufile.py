"""The stand-in for cuFile: failures on demand, budgets, the order of streams, batches."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

import kvikio
import kvikio.cufile_driver
import numpy as np
import pytest
from cuda.bindings import cufile as bindings

from tests.standin import control
from tests.standin.arrays import DeviceArray, call

pytestmark = pytest.mark.cufile

NBYTES = 1 << 20


@pytest.fixture
def content() -> np.ndarray:
    return np.frombuffer(os.urandom(NBYTES), "u1")


@pytest.fixture
def path(tmp_path: Path, content: np.ndarray) -> Path:
    content.tofile(tmp_path / "x")
    return tmp_path / "x"


@contextlib.contextmanager
def handle(path: Path, flags: int = os.O_RDONLY | os.O_DIRECT) -> Iterator[int]:
    fd = os.open(path, flags)
    try:
        registered = register(fd)
        yield registered
        bindings.handle_deregister(registered)
    finally:
        os.close(fd)


def register(fd: int) -> int:
    description = bindings.Descr()
    description.type = bindings.FileHandleType.OPAQUE_FD
    description.handle.fd = fd
    description.fs_ops = 0
    registered: int = bindings.handle_register(description.ptr)
    return registered


#: How kvikio tells of cuFile's codes: by their texts.
TEXTS = {
    5001: "nvidia-fs driver is not loaded",
    5008: "not supported on current file",
    5027: "file descriptor is not registered",
    5028: "file descriptor is already registered",
    5030: "internal error",
    5036: "failed to allocate pinned GPU Memory",
    5038: "stream operation not supported",
}


@pytest.mark.parametrize(("code", "text"), TEXTS.items())
def test_codes_of_the_data_path(path: Path, code, text):
    array = DeviceArray(NBYTES)
    with kvikio.CuFile(path, "r") as file:
        with (
            control.cufile().failing(f"cuFileRead={code}"),
            pytest.raises(RuntimeError, match=text),
        ):
            file.pread(array).get()
        assert file.pread(array).get() == NBYTES


@pytest.mark.parametrize("code", [5001, 5008, 5030])
def test_codes_of_opening(path: Path, code):
    with control.cufile().failing(f"cuFileHandleRegister={code}"), pytest.raises(RuntimeError):
        kvikio.CuFile(path, "r")


@pytest.mark.parametrize("number", [5, 28])
def test_errors_of_the_operating_system(path: Path, number):
    rule = f"cuFileWrite=errno:{number}"
    with (
        kvikio.CuFile(path, "r+") as file,
        control.cufile().failing(rule),
        pytest.raises(RuntimeError, match=os.strerror(number)),
    ):
        file.pwrite(DeviceArray(NBYTES)).get()


def test_failures_from_an_offset_and_a_number_on(path: Path, content: np.ndarray):
    array = DeviceArray(NBYTES)
    with kvikio.CuFile(path, "r") as file:
        with control.cufile().failing("cuFileRead=5030>524288"):
            assert file.raw_read(array, NBYTES // 2) == NBYTES // 2
            with pytest.raises(RuntimeError, match=TEXTS[5030]):
                file.raw_read(array, NBYTES // 2, NBYTES // 2 + 4096)
        with control.cufile().failing("cuFileRead=5030@2x1"):
            assert file.raw_read(array) == NBYTES
            with pytest.raises(RuntimeError, match=TEXTS[5030]):
                file.raw_read(array)
            assert file.raw_read(array) == NBYTES


def test_short_counts(path: Path, content: np.ndarray):
    array = DeviceArray(NBYTES)
    array.store(np.zeros(NBYTES, "u1"))
    with kvikio.CuFile(path, "r") as file, control.cufile().failing("cuFileRead=short:70000"):
        assert file.raw_read(array) == 70_000
    assert np.array_equal(array[:70_000].load(), content[:70_000])
    assert not array[70_000:].load().any()


def test_the_end_of_the_file_is_a_short_count(path: Path):
    with kvikio.CuFile(path, "r") as file:
        assert file.raw_read(DeviceArray(8192), 8192, NBYTES - 100) == 100
        assert file.raw_read(DeviceArray(8192), 8192, NBYTES + 4096) == 0


def test_registering_memory(path: Path):
    array = DeviceArray(NBYTES)
    library = control.cufile()
    kvikio.memory_register(array)
    assert library.gauge("registered buffers") == 1
    assert library.gauge("pinned bytes") == NBYTES
    with pytest.raises(bindings.cuFileError, match="ALREADY_REGISTERED"):
        bindings.buf_register(array.address + 4096, 4096, 0)
    before = library.gauge("registered bytes moved"), library.gauge("bounced bytes moved")
    other = DeviceArray(NBYTES)
    with kvikio.CuFile(path, "r") as file:
        file.raw_read(array)
        file.raw_read(other)
    after = library.gauge("registered bytes moved"), library.gauge("bounced bytes moved")
    assert (after[0] - before[0], after[1] - before[1]) == (NBYTES, NBYTES)
    kvikio.memory_deregister(array)
    with pytest.raises(bindings.cuFileError, match="NOT_REGISTERED"):
        bindings.buf_deregister(array.address)
    with pytest.raises(bindings.cuFileError, match="POINTER_RANGE"):
        bindings.buf_register(array.address, NBYTES + 1, 0)
    assert library.gauge("registered buffers") == 0


def test_the_budget_of_pinned_memory():
    kvikio.cufile_driver.set("max_pinned_memory_size", 2048)
    try:
        arrays = [DeviceArray(NBYTES) for _ in range(3)]
        for array in arrays[:2]:
            bindings.buf_register(array.address, NBYTES, 0)
        with pytest.raises(bindings.cuFileError, match="PINNING_FAILED"):
            bindings.buf_register(arrays[2].address, NBYTES, 0)
        for array in arrays[:2]:
            bindings.buf_deregister(array.address)
    finally:
        kvikio.cufile_driver.set("max_pinned_memory_size", 32 << 20)


def test_freeing_registered_memory_is_noticed():
    before = control.cuda().gauge("freed while registered")
    array = DeviceArray(NBYTES)
    address = array.address
    bindings.buf_register(address, NBYTES, 0)
    array.free()
    assert control.cuda().gauge("freed while registered") == before + 1
    bindings.buf_deregister(address)


def test_a_file_registered_twice(path: Path):
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    registered = register(fd)
    with pytest.raises(bindings.cuFileError, match="ALREADY_REGISTERED"):
        register(fd)
    bindings.handle_deregister(registered)
    bindings.handle_deregister(registered)
    bindings.handle_deregister(register(fd))
    os.close(fd)


def test_files_that_are_refused(path: Path):
    with pytest.raises(bindings.cuFileError, match="DIO_NOT_SET"), handle(path, os.O_RDONLY):
        pass
    with (
        pytest.raises(bindings.cuFileError, match="INVALID_FILE_TYPE"),
        handle(path.parent, os.O_RDONLY),
    ):
        pass


def test_freed_memory_and_deregistered_files(path: Path):
    array = DeviceArray(NBYTES)
    address = array.address
    array.free()
    with handle(path) as registered:
        assert bindings.read(registered, address, 4096, 0, 0) == -5014
    assert bindings.read(registered, address, 4096, 0, 0) == -5027


def test_the_order_of_a_stream(path: Path, content: np.ndarray):
    stream = int(call("cuStreamCreate", 1))
    array = DeviceArray(NBYTES)
    array.store(np.zeros(NBYTES, "u1"))
    with kvikio.CuFile(path, "r") as file:
        with control.cuda().holding(stream):
            future = file.raw_read_async(array, stream)
            assert not array.load().any(), "the stream has not come to it"
        assert future.check_bytes_done() == NBYTES
        assert np.array_equal(array.load(), content)
        with control.cufile().failing("cuFileReadAsync=5038"), pytest.raises(RuntimeError):
            file.raw_read_async(array, stream)
        with control.cufile().failing("cuFileReadAsync=short:100"):
            assert file.raw_read_async(array, stream).check_bytes_done() == 100
        with control.cufile().failing("cuFileReadAsync=late:5030"), pytest.raises(RuntimeError):
            file.raw_read_async(array, stream).check_bytes_done()
    call("cuStreamDestroy", stream)


def batch(registered: int, array: DeviceArray, count: int) -> list[tuple[int, int, int]]:
    """Read `count` pages and return (cookie, status, result) of each, in the order of ending."""
    made = bindings.batch_io_set_up(count)
    parameters, events = bindings.IOParams(count), bindings.IOEvents(count)
    for i in range(count):
        one = parameters[i]
        one.mode, one.fh, one.opcode, one.cookie = 1, registered, 0, i + 1
        one.u.batch.dev_ptr_base, one.u.batch.dev_ptr_offset = array.address, i * 4096
        one.u.batch.file_offset, one.u.batch.size_ = i * 4096, 4096
    bindings.batch_io_submit(made, count, parameters.ptr, 0)
    ended = ctypes.c_uint(count)
    bindings.batch_io_get_status(made, count, ctypes.addressof(ended), events.ptr, 0)
    bindings.batch_io_destroy(made)
    results = np.array([int(events[i].ret) for i in range(ended.value)], "u8").astype("i8")
    return [
        (int(events[i].cookie), int(events[i].status), int(results[i])) for i in range(ended.value)
    ]


def test_batches(path: Path, content: np.ndarray):
    array = DeviceArray(NBYTES)
    with handle(path) as registered:
        assert [row[2] for row in batch(registered, array, 128)] == [4096] * 128
        assert np.array_equal(array[: 128 * 4096].load(), content[: 128 * 4096])
        with control.cufile().failing("cuFileBatchEntry=5030@3x1,cuFileBatchEntry=short:9@5x1"):
            rows = batch(registered, array, 8)
        assert [row[2] for row in rows] == [4096, 4096, -5030, 4096, 9, 4096, 4096, 4096]
        assert rows[2][1] == 0x40
    with pytest.raises(bindings.cuFileError, match="INVALID_VALUE"):
        bindings.batch_io_set_up(129)


def test_properties():
    driver = kvikio.cufile_driver
    assert driver.get("is_gds_available")
    assert driver.get("max_pinned_memory_size") == 32 << 20
    assert driver.libcufile_version() >= (1, 2)
