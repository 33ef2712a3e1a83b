"""Devices, contexts and memory, through cuda-python."""

import ctypes
import os
import signal

import numpy as np
import pytest
from cuda.bindings import driver

from tests.standin.arrays import CudaError, DeviceArray, call, use_device
from tests.standin.control import cuda

ATTRIBUTE = driver.CUpointer_attribute


def attribute(name: str, address: int):
    return call(
        "cuPointerGetAttribute", getattr(ATTRIBUTE, f"CU_POINTER_ATTRIBUTE_{name}"), address
    )


def test_devices():
    assert call("cuDeviceGetCount") == 4
    assert call("cuDriverGetVersion") == 13000
    names = {call("cuDeviceGetName", 64, i).rstrip(b"\0") for i in range(4)}
    assert len(names) == 4
    with pytest.raises(CudaError, match="INVALID_DEVICE"):
        call("cuDeviceGet", 4)
    assert call("cuDeviceTotalMem", 0) == 2 << 30


def test_contexts_are_made_only_for_devices_in_use():
    use_device(2)
    assert [cuda().gauge("contexts", device) for device in (0, 2, 3)] == [1, 1, 0]
    use_device(0)


def test_a_created_context_takes_its_memory_with_it():
    before = cuda().gauge("contexts", 1)
    context = call("cuCtxCreate", None, 0, call("cuDeviceGet", 1))
    call("cuMemAlloc", 100)
    assert cuda().gauge("contexts", 1) == before + 1
    assert cuda().gauge("allocations", 1) == 1
    call("cuCtxDestroy", context)
    assert cuda().gauge("contexts", 1) == before
    assert cuda().gauge("allocations", 1) == 0
    call("cuCtxPushCurrent", context)
    with pytest.raises(CudaError, match="CONTEXT_IS_DESTROYED"):
        call("cuMemAlloc", 100)
    call("cuCtxPopCurrent")


@pytest.mark.parametrize("managed", [False, True])
def test_memory_keeps_what_is_stored(managed):
    content = np.frombuffer(os.urandom(100_000), "u1")
    array = DeviceArray(100_000, managed=managed)
    array[10:].store(content[10:])
    array[:10].store(content[:10])
    assert np.array_equal(array.load(), content)


def test_the_host_can_not_touch_device_memory():
    array = DeviceArray(4096)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGSEGV, signal.SIG_DFL)
        ctypes.string_at(array.address, 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV
    pipe = os.pipe()
    with pytest.raises(OSError, match="Bad address"):
        os.write(pipe[1], (ctypes.c_char * 10).from_address(array.address))
    managed = DeviceArray(4096, managed=True)
    ctypes.memset(managed.address, 7, 4096)
    assert (managed.load() == 7).all()
    for end in pipe:
        os.close(end)


def test_fresh_memory_is_not_zero():
    assert (DeviceArray(70_000).load() != 0).all()


def test_addresses_are_aligned_as_the_driver_aligns_them():
    small = [DeviceArray(600) for _ in range(4)]
    assert all(array.address % 512 == 0 for array in small)
    assert any(array.address % 4096 for array in small)
    assert DeviceArray(3 << 20).address % (2 << 20) == 0


def test_use_after_free_and_double_free():
    array = DeviceArray(4096)
    address = array.address
    array.free()
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        call("cuMemFree", address)
    for use in (
        lambda: call("cuMemcpyDtoH", bytearray(10), address, 10),
        lambda: call("cuMemsetD8", address, 0, 10),
        lambda: attribute("MEMORY_TYPE", address),
    ):
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            use()
    assert DeviceArray(4096).address != address
    cuda().reuse_addresses(True)
    array = DeviceArray(4096)
    address = array.address
    array.free()
    assert DeviceArray(4096).address == address
    cuda().reuse_addresses(False)


def test_copies_stay_in_their_allocation():
    array = DeviceArray(1000)
    for address, nbytes in ((array.address, 1001), (array.address + 999, 2)):
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            call("cuMemcpyDtoH", bytearray(nbytes), address, nbytes)


def test_running_out_of_memory():
    free, total = call("cuMemGetInfo")
    with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
        call("cuMemAlloc", free + 1)
    assert call("cuMemGetInfo") == (free, total)
    array = DeviceArray(1 << 20)
    assert call("cuMemGetInfo")[0] == free - (1 << 20)
    assert cuda().gauge("bytes", 0) == total - free + (1 << 20)
    del array
    assert call("cuMemGetInfo")[0] == free


def test_what_a_pointer_points_at():
    with pytest.raises(CudaError):
        attribute("MEMORY_TYPE", np.zeros(10).ctypes.data)
    array = DeviceArray(10_000)
    inside = array.address + 100
    assert attribute("MEMORY_TYPE", inside) == driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
    assert not attribute("IS_MANAGED", inside)
    assert attribute("DEVICE_ORDINAL", inside) == 0
    assert int(attribute("RANGE_START_ADDR", inside)) == array.address
    assert attribute("RANGE_SIZE", inside) == 10_000
    base, nbytes = call("cuMemGetAddressRange", inside)
    assert (int(base), nbytes) == (array.address, 10_000)
    assert attribute("IS_MANAGED", DeviceArray(10, managed=True).address)
    other = DeviceArray(10, 3)
    assert attribute("DEVICE_ORDINAL", other.address) == 3
    again = DeviceArray(10_000)
    assert attribute("BUFFER_ID", again.address) != attribute("BUFFER_ID", inside)
    del other
    use_device(0)


def test_page_locked_memory():
    before = cuda().gauge("page-locked"), cuda().gauge("page-locked bytes")
    memory = call("cuMemHostAlloc", 5000, 0)
    assert attribute("MEMORY_TYPE", memory) == driver.CUmemorytype.CU_MEMORYTYPE_HOST
    own = np.zeros(10_000, "u1")
    call("cuMemHostRegister", own.ctypes.data, own.nbytes, 0)
    with pytest.raises(CudaError, match="HOST_MEMORY_ALREADY_REGISTERED"):
        call("cuMemHostRegister", own.ctypes.data + 5000, 100, 0)
    after = cuda().gauge("page-locked"), cuda().gauge("page-locked bytes")
    assert (after[0] - before[0], after[1] - before[1]) == (2, 15_000)
    call("cuMemHostUnregister", own.ctypes.data)
    with pytest.raises(CudaError, match="HOST_MEMORY_NOT_REGISTERED"):
        call("cuMemHostUnregister", own.ctypes.data)
    call("cuMemFreeHost", memory)
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        call("cuMemFreeHost", memory)
    assert (cuda().gauge("page-locked"), cuda().gauge("page-locked bytes")) == before


def test_rules_and_counters():
    cuda().reset_counts()
    with cuda().failing("cuMemAlloc=2@2x1,cuMemHost*=1"):
        first = DeviceArray(10)
        with pytest.raises(CudaError, match="OUT_OF_MEMORY"):
            DeviceArray(10)
        second = DeviceArray(10)
        with pytest.raises(CudaError, match="INVALID_VALUE"):
            call("cuMemHostAlloc", 10, 0)
    assert len(first) == len(second) == 10
    assert cuda().count("cuMemAlloc") == 3
    assert cuda().counts()["cuMemHostAlloc"] == 1
    for text in ("cuMemAlloc", "=5", "cuMemAlloc=x", "cuMemAlloc=5?3"):
        with pytest.raises(ValueError, match="no rules"):
            cuda().rules(text)


def test_a_forked_child_has_no_driver():
    child = os.fork()
    if child == 0:
        codes = {driver.cuInit(0)[0], driver.cuMemAlloc(10)[0]}
        os._exit(codes != {driver.CUresult.CUDA_ERROR_NOT_INITIALIZED})
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_kernels_are_refused():
    with pytest.raises(CudaError, match="NOT_SUPPORTED"):
        call("cuModuleLoadData", b"no code")
