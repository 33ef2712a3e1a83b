"""numba-cuda and cuda.core on the stand-in, kernels aside."""

import os

import numpy as np
import pytest

from tests.standin.arrays import use_device


@pytest.fixture(autouse=True)
def context():
    """In place of the one that counts memory: numba keeps what it frees for later."""
    use_device(0)


def test_numba():
    from numba import cuda

    assert cuda.is_available()
    assert len(cuda.gpus) == 4
    content = np.frombuffer(os.urandom(100_000), "u1")
    stream = cuda.stream()
    array = cuda.to_device(content, stream=stream)
    back = cuda.pinned_array(100_000, "u1")
    array.copy_to_host(back, stream=stream)
    stream.synchronize()
    assert np.array_equal(back, content)
    event = cuda.event()
    event.record(stream)
    event.synchronize()
    assert event.query()
    interface = array.__cuda_array_interface__
    assert cuda.as_cuda_array(array).copy_to_host().nbytes == interface["shape"][0]


def test_cuda_core():
    core = pytest.importorskip("cuda.core", exc_type=ImportError)
    device = core.Device(0)
    device.set_current()
    stream = device.create_stream()
    buffer = device.allocate(4096, stream=stream)
    assert buffer.size == 4096
    buffer.close(stream)
    stream.sync()
    stream.close()
