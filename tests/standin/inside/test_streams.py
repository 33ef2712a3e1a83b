"""Streams work later, in order, and a missing wait shows."""

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from cuda.bindings import driver

from tests.standin.arrays import CudaError, DeviceArray, call, use_device
from tests.standin.control import cuda

NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
READY = driver.CUresult.CUDA_SUCCESS


@contextlib.contextmanager
def stream(flags: int = 0) -> Iterator[int]:
    made = call("cuStreamCreate", flags)
    yield int(made)
    call("cuStreamDestroy", made)


@contextlib.contextmanager
def event(flags: int = 0) -> Iterator[driver.CUevent]:
    made = call("cuEventCreate", flags)
    yield made
    call("cuEventDestroy", made)


@contextlib.contextmanager
def page_locked(nbytes: int) -> Iterator[np.ndarray]:
    address = call("cuMemHostAlloc", nbytes, 0)
    yield np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(int(address)))
    call("cuMemFreeHost", address)


def test_a_copy_happens_later():
    content = np.frombuffer(os.urandom(50_000), "u1")
    array = DeviceArray(50_000)
    array.store(content)
    with stream() as s, page_locked(50_000) as host:
        host[:] = 0
        with cuda().holding(s):
            call("cuMemcpyDtoHAsync", host.ctypes.data, array.address, 50_000, s)
            assert driver.cuStreamQuery(s)[0] == NOT_READY
            assert not host.any(), "who does not wait sees what was there before"
        call("cuStreamSynchronize", s)
        assert driver.cuStreamQuery(s)[0] == READY
        assert np.array_equal(host, content)


def test_a_source_changed_too_early_shows():
    array = DeviceArray(1000)
    with stream() as s, page_locked(1000) as host:
        host[:] = 1
        with cuda().holding(s):
            call("cuMemcpyHtoDAsync", array.address, host.ctypes.data, 1000, s)
            host[:] = 2
        call("cuStreamSynchronize", s)
    assert (array.load() == 2).all()


def test_pageable_memory_is_waited_for():
    array = DeviceArray(1000)
    array.store(np.full(1000, 9, "u1"))
    host = np.zeros(1000, "u1")
    with stream() as s, cuda().failing("cuMemcpyDtoHAsync=delay:20000"):
        call("cuMemcpyDtoHAsync", host.ctypes.data, array.address, 1000, s)
        assert (host == 9).all()


def test_a_stream_keeps_its_order_and_others_do_not_wait():
    array = DeviceArray(1000)
    with stream(1) as one, stream(1) as two, cuda().holding(one):
        call("cuMemsetD8Async", array[:500].address, 1, 500, one)
        call("cuMemsetD8Async", array[:500].address, 2, 500, one)
        call("cuMemsetD8Async", array[500:].address, 3, 500, two)
        call("cuStreamSynchronize", two)
        assert driver.cuStreamQuery(one)[0] == NOT_READY
    with stream() as s:
        call("cuStreamSynchronize", s)
    call("cuCtxSynchronize")
    assert (array[:500].load() == 2).all()
    assert (array[500:].load() == 3).all()


def test_an_event_orders_streams():
    array = DeviceArray(1000)
    with stream(1) as one, stream(1) as two, event() as done:
        assert driver.cuEventQuery(done)[0] == READY, "an event never recorded is over"
        with cuda().holding(one):
            call("cuMemsetD8Async", array.address, 1, 1000, one)
            call("cuEventRecord", done, one)
            call("cuStreamWaitEvent", two, done, 0)
            call("cuMemsetD8Async", array.address, 2, 1000, two)
            assert driver.cuEventQuery(done)[0] == NOT_READY
            assert driver.cuStreamQuery(two)[0] == NOT_READY
        call("cuEventSynchronize", done)
        call("cuStreamSynchronize", two)
    assert (array.load() == 2).all()


@pytest.mark.parametrize(("flags", "waits"), [(0, True), (1, False)])
def test_the_legacy_stream_and_blocking_streams_wait_for_one_another(flags, waits):
    array = DeviceArray(1000)
    with stream(flags) as s, event() as done:
        with cuda().holding(s):
            call("cuMemsetD8Async", array.address, 1, 1000, s)
            call("cuMemsetD8Async", array.address, 2, 1000, 0)
            call("cuEventRecord", done, 0)
            if waits:
                assert driver.cuEventQuery(done)[0] == NOT_READY
            else:
                call("cuEventSynchronize", done)
        call("cuStreamSynchronize", s)
        call("cuStreamSynchronize", 0)
    assert (array.load() == (2 if waits else 1)).all()


def test_freeing_waits_for_work():
    array = DeviceArray(1000)
    with stream() as s, cuda().failing("cuMemsetD8Async=delay:20000"):
        call("cuMemsetD8Async", array.address, 1, 1000, s)
        array.free()
        assert driver.cuStreamQuery(s)[0] == READY


def test_host_functions_run_in_the_streams_thread():
    called = threading.Event()
    names = []

    def function(_: object) -> None:
        names.append(threading.get_native_id())
        called.set()

    kept = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(function)
    with stream() as s:
        call("cuLaunchHostFunc", s, driver.CUhostFn(ctypes.cast(kept, ctypes.c_void_p).value), 0)
        call("cuStreamSynchronize", s)
    assert called.is_set()
    assert names != [threading.get_native_id()]


def test_timing():
    with stream() as s, event() as begin, event() as end:
        call("cuEventRecord", begin, s)
        with cuda().failing("cuEventRecord=delay:20000"):
            call("cuEventRecord", end, s)
        call("cuEventSynchronize", end)
        assert call("cuEventElapsedTime", begin, end) >= 20
    with event(2) as begin, event() as end, pytest.raises(CudaError, match="INVALID_HANDLE"):
        call("cuEventElapsedTime", begin, end)


def test_handles_of_nothing():
    made = call("cuStreamCreate", 0)
    call("cuStreamDestroy", made)
    gone = call("cuEventCreate", 0)
    call("cuEventDestroy", gone)
    for use in (
        lambda: call("cuStreamSynchronize", made),
        lambda: call("cuStreamDestroy", made),
        lambda: call("cuStreamSynchronize", 0x1234560),
        lambda: call("cuEventRecord", gone, 0),
        lambda: call("cuEventQuery", gone),
    ):
        with pytest.raises(CudaError, match="INVALID_HANDLE"):
            use()


def test_an_event_and_a_stream_of_two_devices():
    with event() as mine:
        use_device(1)
        with stream() as s, pytest.raises(CudaError, match="INVALID_HANDLE"):
            call("cuEventRecord", mine, s)
        use_device(0)


def test_work_that_fails_late_ends_the_context():
    context = call("cuCtxCreate", None, 0, call("cuDeviceGet", 1))
    memory = call("cuMemAlloc", 100)
    with cuda().failing("cuMemsetD8Async=late:700"):
        call("cuMemsetD8Async", memory, 0, 100, 0)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        call("cuStreamSynchronize", 0)
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        call("cuMemAlloc", 100)
    call("cuCtxDestroy", context)


def test_many_threads_and_streams():
    content = np.frombuffer(os.urandom(200_000), "u1")
    failures: list[BaseException] = []

    def work() -> None:
        try:
            use_device(0)
            array = DeviceArray(200_000)
            with stream(1) as s, page_locked(200_000) as host:
                for _ in range(20):
                    host[:] = content
                    call("cuMemcpyHtoDAsync", array.address, host.ctypes.data, 200_000, s)
                    call("cuStreamSynchronize", s)
                    host[:] = 0
                    call("cuMemcpyDtoHAsync", host.ctypes.data, array.address, 200_000, s)
                    call("cuStreamSynchronize", s)
                    assert np.array_equal(host, content)
            array.free()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
