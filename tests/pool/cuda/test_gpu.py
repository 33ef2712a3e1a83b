"""CUDA memory on a GPU, with torch and CuPy."""

import gc

import pytest
import torch

from tensorspill.errors import CapacityError, ClosedError
from tensorspill.pool import BufferPool
from tensorspill.pool.cuda.arrays import memory_of
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.pointers import describe
from tensorspill.pool.cuda.streams import Event, current_stream, handle_of

pytestmark = pytest.mark.gpu

MIB = 1 << 20
DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors(dtype):
    tensor = torch.zeros((3, 1000), dtype=dtype, device="cuda")
    found = memory_of(tensor[1:])
    assert (found.address, found.nbytes) == (tensor[1:].data_ptr(), 2000 * dtype.itemsize)
    assert str(found.device) == "cuda:0"
    with current(0):
        info = describe(found.address)
    assert (info.kind, info.device) == ("device", 0)
    assert info.base <= found.address
    assert found.address + found.nbytes <= info.base + info.nbytes


@pytest.mark.parametrize("resource", ["driver", "cupy"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_buffers_are_tensors(dtype, resource):
    if resource == "cupy":
        pytest.importorskip("cupy")
    with BufferPool(MIB, "cuda", poison=True, resource=resource) as pool:
        buffer = pool.allocate((10, 100), dtype)
        tensor = buffer.tensor
        assert (tensor.shape, tensor.dtype, str(tensor.device)) == ((10, 100), dtype, "cuda:0")
        assert tensor.data_ptr() == buffer.address
        assert bool((tensor.view(torch.uint8) == 0xFF).all())
        assert tensor.untyped_storage().nbytes() == buffer.nbytes
        tensor.view(torch.uint8).fill_(7)
        assert bool((buffer.tensor.view(torch.uint8) == 7).all())
        del tensor
        buffer.release()
        with pytest.raises(ClosedError):
            _ = buffer.tensor


def test_a_tensor_keeps_its_memory():
    with BufferPool(MIB, "cuda") as pool:
        buffer = pool.allocate(MIB)
        tensor = buffer.tensor[:10]
        del buffer
        gc.collect()
        with pytest.raises(CapacityError):
            pool.allocate(MIB)
        tensor.fill_(3)
        del tensor
        gc.collect()
        pool.allocate(MIB)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "complex64"])
def test_cupy_arrays(dtype):
    cupy = pytest.importorskip("cupy")
    array = cupy.zeros((4, 5), dtype)
    found = memory_of(array)
    assert (found.address, found.nbytes) == (array.data.ptr, array.nbytes)


def test_streams():
    stream = torch.cuda.Stream()
    assert handle_of(stream) == stream.cuda_stream
    with torch.cuda.stream(stream):
        assert current_stream(0) == stream.cuda_stream
    with Event(0) as event:
        event.record(stream)
        event.synchronize()
