"""The memory of arrays, and what the driver knows of addresses."""

import numpy as np
import pytest
import torch
from numba import cuda as numba_cuda

from tensorspill.errors import UnsupportedError
from tensorspill.pool.cuda.arrays import memory_of
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.pointers import describe, first_unusable
from tensorspill.pool.page_lock import PageLock
from tensorspill.pool.slab import Slab
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda


@pytest.fixture(autouse=True)
def context():
    with current(0):
        yield


@pytest.mark.parametrize("dtype", ["u1", "i8", "f2", "f4", "c16", "?"])
def test_numba(dtype):
    array = numba_cuda.device_array((3, 4, 5), dtype)
    found = memory_of(array)
    assert found.address == array.__cuda_array_interface__["data"][0]
    assert found.nbytes == 60 * np.dtype(dtype).itemsize
    assert str(found.device) == "cuda:0"
    assert not found.read_only
    assert found.owner is array
    part = array[1:]
    assert memory_of(part).address == found.address + found.nbytes // 3
    assert memory_of(numba_cuda.device_array(0, dtype)).nbytes == 0


def test_what_is_not_contiguous():
    array = numba_cuda.device_array((4, 4), "f4")
    for view in (array[:, 1:], array[::2], array[1:, :2]):
        with pytest.raises(UnsupportedError, match="contiguous"):
            memory_of(view)
    # One row and one column are contiguous, whatever their strides say.
    assert memory_of(array[2:3]).nbytes == 16
    assert memory_of(array[1:2, 1:2]).nbytes == 4


class Odd:
    """Memory of a dtype that numpy has not, such as bfloat16 or float8."""

    def __init__(self, array: DeviceArray, typestr: str, shape: tuple[int, ...]) -> None:
        self.array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__ | {
            "typestr": typestr,
            "shape": shape,
        }


@pytest.mark.parametrize(("typestr", "count"), [("<V2", 50), ("|V1", 100), ("<f8", 12)])
def test_dtypes_without_a_name(typestr, count):
    assert memory_of(Odd(DeviceArray(100), typestr, (count,))).nbytes == count * int(typestr[2:])


def test_read_only():
    array = DeviceArray(100)
    array.read_only = True
    assert memory_of(array).read_only


@pytest.mark.parametrize("nothing", [5, b"bytes", object(), torch.zeros(3), np.zeros(3), None])
def test_no_gpu_memory(nothing):
    with pytest.raises(UnsupportedError):
        memory_of(nothing)


def test_freed():
    array = DeviceArray(100)
    array.free()
    array.address = DeviceArray(100).address + (1 << 40)
    with pytest.raises(UnsupportedError):
        memory_of(array)


def test_kinds_of_addresses():
    array, shared = DeviceArray(10_000, 1), DeviceArray(100, managed=True)
    info = describe(array.address + 17)
    assert (info.kind, info.device, info.base) == ("device", 1, array.address)
    assert info.nbytes >= 10_000
    assert describe(shared.address).kind == "managed"
    with Slab(1 << 20, page_lock="no") as slab:
        assert describe(slab.address).kind == "unknown"
        lock = PageLock(slab.array)
        assert describe(slab.address + 4096).kind == "page-locked"
        lock.release()
        assert describe(slab.address).kind == "unknown"
    address = array.address
    array.free()
    assert describe(address).kind == "unknown"


def test_ranges_that_can_not_be_used():
    good, other = DeviceArray(1 << 20), DeviceArray(100, 1)
    shared = DeviceArray(100, managed=True)
    freed = DeviceArray(100)
    address = freed.address
    freed.free()
    base = good.address
    assert first_unusable([base, base + 5000, base + 100], [100, 1000, 7], 0) is None
    for bad, why in (
        (other.address, "cuda:1"),
        (shared.address, "managed"),
        (address, "freed"),
    ):
        found = first_unusable([base, bad], [100, 100], 0)
        assert found is not None
        assert found[0] == 1
        assert why in found[1]
    assert first_unusable([base, address], [100, 0], 0) is None, "no bytes, no matter where"
    beyond = first_unusable([good.address + (1 << 20) - 4], [1 << 30], 0)
    assert beyond is not None


def test_the_driver_is_asked_once_for_an_allocation():
    array = DeviceArray(1 << 20)
    before = cuda().count("cuPointerGetAttributes")
    addresses = [array.address + i * 256 for i in range(4096)]
    assert first_unusable(addresses, [256] * 4096, 0) is None
    assert cuda().count("cuPointerGetAttributes") == before + 1
