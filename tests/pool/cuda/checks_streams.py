"""Streams and events of our own, and the handles of others'."""

import ctypes
import gc

import pytest
from numba import cuda as numba_cuda

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import call
from tensorspill.pool.cuda.streams import Event, Stream, current_stream, handle_of, wait_for
from tests.standin.control import cuda


class Like:
    """A stream of some library."""

    def __init__(self, **fields: object) -> None:
        self.__dict__.update(fields)


class Protocol:
    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, 77


def test_handles():
    stream = Stream(0)
    assert handle_of(stream) == stream.handle
    assert handle_of(stream.handle) == stream.handle
    assert handle_of(Protocol()) == 77
    assert handle_of(Like(cuda_stream=78)) == 78
    assert handle_of(Like(ptr=79)) == 79
    assert handle_of(Like(handle=ctypes.c_void_p(80))) == 80
    assert handle_of(Like(handle=ctypes.c_void_p())) == 0
    for default in (0, 1, 2):
        assert handle_of(default) == default
    with current(0):
        theirs = numba_cuda.stream()
        assert handle_of(theirs) not in (0, stream.handle)
        Event(0).record(theirs)
    stream.close()


@pytest.mark.parametrize("nonsense", [None, True, "stream", 1.5, object(), Like(ptr="x")])
def test_no_streams(nonsense):
    with pytest.raises(UnsupportedError, match="no CUDA stream"):
        handle_of(nonsense)


def test_an_event_comes_when_the_stream_does():
    with Stream(0) as stream, Event(0) as event, current(0):
        with cuda().holding(stream.handle):
            event.record(stream)
            assert not event.query()
        event.synchronize()
        assert event.query()


def test_one_stream_waits_for_another():
    with Stream(0) as first, Stream(0) as second, Event(0) as mark, Event(0) as end, current(0):
        with cuda().holding(first.handle):
            mark.record(first)
            wait_for(second.handle, mark)
            end.record(second)
            assert not end.query()
        end.synchronize()


def test_a_stream_of_another_device():
    with Stream(1) as other, Event(0) as event:
        with pytest.raises(UnsupportedError, match="Use a stream of cuda:0"):
            event.record(other)
        event.record(0)


def test_a_stream_of_another_context():
    context = call("cuCtxCreate", None, 0, 0)  # current from now on
    foreign = call("cuStreamCreate", 0)
    call("cuCtxPopCurrent")
    with Event(0) as event, pytest.raises(UnsupportedError, match="Use a stream of cuda:0"):
        event.record(int(foreign))
    call("cuCtxDestroy", context)


def test_a_gpu_that_fails():
    with Stream(0) as stream, Event(0) as event:
        event.record(stream)
        with cuda().failing("cuEventQuery=700"), pytest.raises(BrokenError, match="ILLEGAL"):
            event.query()


def test_the_default_stream():
    assert current_stream(0) == 0
    with current(0):
        Event(0).record(current_stream(0))


def test_nothing_leaks():
    gc.collect()
    before = cuda().gauge("streams"), cuda().gauge("events")
    for _ in range(50):
        dropped = Stream(0), Event(0)
        del dropped
        with Stream(0) as stream, Event(0) as event:
            event.record(stream)
            event.synchronize()
        stream.close()
        event.close()
        assert stream.closed
        assert event.closed
        assert "closed" in repr(stream)
    gc.collect()
    assert (cuda().gauge("streams"), cuda().gauge("events")) == before
    assert int(call("cuDeviceGetCount")) == 4
