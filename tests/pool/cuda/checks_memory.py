"""Pools of GPU memory."""

import gc

import numpy as np
import pytest
import torch
from numba import cuda as numba_cuda

from tensorspill.errors import BusyError, CapacityError, ClosedError, UnsupportedError
from tensorspill.pool import BufferPool
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import call
from tensorspill.pool.cuda.memory import DeviceSlab
from tensorspill.pool.live import live_ranges
from tests.pool.cuda.checks_driver import in_child
from tests.pool.helpers import RandomAllocator, check_pool
from tests.standin.control import cuda

KIB, MIB = 1 << 10, 1 << 20


def load(address: int, nbytes: int) -> np.ndarray:
    content = np.zeros(nbytes, "u1")
    with current(0):
        call("cuMemcpyDtoH", content.ctypes.data, address, nbytes)
    return content


def held() -> int:
    gc.collect()
    return cuda().gauge("bytes")


def test_buffers_of_any_size():
    with BufferPool(MIB, "cuda:0", poison=True) as pool:
        assert str(pool.device) == "cuda:0"
        buffers = [pool.allocate(n) for n in (1, 100, 5000, 4096)]
        for buffer in buffers:
            assert buffer.address % 4096 == 0
            assert (load(buffer.address, buffer.nbytes) == 0xFF).all()
        assert len({buffer.address for buffer in buffers}) == 4
        check_pool(pool)
        for buffer in buffers:
            buffer.release()
        check_pool(pool)
        assert pool.statistics().free == MIB
        empty = pool.allocate((3, 0))
        assert (empty.nbytes, empty.address) == (0, 0)
        with pytest.raises(CapacityError):
            pool.allocate(2 * MIB)


@pytest.mark.parametrize("alignment", [64, 4096, 2 * MIB])
def test_alignment(alignment):
    with BufferPool(100, "cuda:0", alignment=alignment) as pool:
        assert pool.allocate(10).address % alignment == 0


@pytest.mark.parametrize(
    ("dtype", "typestr", "shape"),
    [
        (torch.float32, "<f4", (3, 5)),
        (torch.bool, "|b1", (3, 5)),
        (torch.complex128, "<c16", (3, 5)),
        (torch.uint64, "<u8", (3, 5)),
        (torch.bfloat16, "|u1", (30,)),
        (torch.float8_e4m3fn, "|u1", (15,)),
    ],
)
def test_other_libraries_take_buffers(dtype, typestr, shape):
    with BufferPool(MIB, "cuda:0") as pool:
        buffer = pool.allocate((3, 5), dtype)
        assert buffer.nbytes == 15 * dtype.itemsize
        assert (buffer.shape, buffer.dtype) == ((3, 5), dtype)
        interface = buffer.__cuda_array_interface__
        assert (interface["typestr"], interface["shape"]) == (typestr, shape)
        with current(0):
            array = numba_cuda.as_cuda_array(buffer)
            array.copy_to_device(np.zeros(array.shape, array.dtype))
        assert not load(buffer.address, buffer.nbytes).any()
        assert not buffer.has_tensor
        with pytest.raises(UnsupportedError, match="torch has no CUDA"):
            _ = buffer.tensor
        buffer.release()
        with pytest.raises(ClosedError):
            _ = buffer.tensor
        with pytest.raises(ClosedError):
            _ = buffer.__cuda_array_interface__


def test_buffers_of_host_memory_have_no_such_interface():
    with BufferPool(MIB, page_lock="no") as pool:
        assert not hasattr(pool.allocate(10), "__cuda_array_interface__")


def test_a_dropped_buffer_goes_back():
    with BufferPool(8 * KIB, "cuda:0") as pool:
        buffer = pool.allocate(8 * KIB)
        with current(0):
            array = numba_cuda.as_cuda_array(buffer)
        del buffer
        gc.collect()
        with pytest.raises(CapacityError):
            pool.allocate(8 * KIB)
        del array
        gc.collect()
        pool.allocate(8 * KIB)


def test_memory_stays_while_it_is_used():
    before = held()
    pool = BufferPool(MIB, "cuda:0")
    buffer = pool.allocate(100)
    with current(0):
        array = numba_cuda.as_cuda_array(buffer)
    pool.close()
    pool.close()
    assert buffer.released
    assert held() > before
    load(array.__cuda_array_interface__["data"][0], 100)
    del array, buffer
    assert held() == before
    with pytest.raises(ClosedError):
        pool.allocate(1)


def test_nothing_leaks():
    before = held()
    for _ in range(20):
        with BufferPool(3 * MIB, "cuda:1", allocator=RandomAllocator(3 * MIB)) as pool:
            kept = [pool.allocate(10_000) for _ in range(20)]
            reservation = pool.reserve(MIB)
            reservation.allocate(100)
            del kept
    assert cuda().gauge("contexts", 2) == 0
    del pool, reservation
    assert held() == before


def test_memory_in_use():
    with BufferPool(MIB, "cuda:0") as pool:
        buffer = pool.allocate(1000)
        token = live_ranges.add(np.array([buffer.address]), np.array([10]))
        with pytest.raises(BusyError):
            buffer.release()
        with pytest.raises(BusyError):
            pool.close()
        live_ranges.remove(token)
        buffer.release()


def test_more_than_the_gpu_has():
    before = held()
    with pytest.raises(CapacityError, match="OUT_OF_MEMORY"):
        BufferPool(1 << 50, "cuda:0")
    assert held() == before


def test_arguments():
    for arguments in ({"numa_node": 0}, {"page_lock": "yes"}, {"resource": "magic"}):
        with pytest.raises(UnsupportedError):
            BufferPool(MIB, "cuda:0", **arguments)
    with pytest.raises(UnsupportedError):
        BufferPool(MIB, "cuda:9")
    with pytest.raises(UnsupportedError):
        DeviceSlab(-1)


def test_a_slab():
    with DeviceSlab(1000, "cuda:1") as slab:
        assert "cuda:1" in repr(slab)
        part = slab.part(10, 20)
        assert part.__cuda_array_interface__["data"] == (slab.address + 10, False)
        slab.fill(10, 20, 7)
    assert slab.closed
    with pytest.raises(ClosedError):
        slab.part(0, 1)
    assert "closed" in repr(slab)


def test_a_forked_child_leaves_the_memory_alone():
    pool = BufferPool(MIB, "cuda:0")
    buffer = pool.allocate(100)
    freed = cuda().count("cuMemFree")

    def check() -> None:
        with pytest.raises(ClosedError):
            pool.allocate(1)
        buffer.release()
        pool.close()
        assert cuda().count("cuMemFree") == freed

    in_child(check)
    assert load(buffer.address, 100).size == 100
    buffer.release()
    pool.close()
