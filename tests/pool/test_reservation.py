"""Reservations: room that is certain, and goes back."""

import gc
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tensorspill.errors import CapacityError, ClosedError, UnsupportedError
from tensorspill.pool import BufferPool
from tests.pool.helpers import RandomAllocator, check_pool

KIB = 1024


@pytest.fixture(params=["lowest", "random"])
def pool(request: pytest.FixtureRequest) -> Iterator[BufferPool]:
    allocator = RandomAllocator(64 * KIB, seed=2) if request.param == "random" else None
    with BufferPool(64 * KIB, poison=True, allocator=allocator) as pool:
        yield pool
        check_pool(pool)


def test_room_is_certain(pool: BufferPool) -> None:
    sizes = [5000, 100, 20_000, 0, 4096]
    assert pool.reserve(np.int64(5000)).nbytes == 8 * KIB  # type: ignore[arg-type]
    reservation = pool.reserve(sizes)
    filler = []
    while (largest := pool.statistics().largest) > 0:
        filler.append(pool.allocate(largest))
    buffers = [reservation.allocate(size) for size in sizes]
    assert [buffer.nbytes for buffer in buffers] == sizes
    assert reservation.nbytes == pool.statistics().reserved == 0
    check_pool(pool)


def test_one_size_serves_several_buffers() -> None:
    with BufferPool(64 * KIB) as pool:
        with pool.reserve("20KiB") as reservation:
            first = reservation.allocate((8, KIB), torch.uint8)
            second = reservation.allocate((3, KIB), torch.float32)
            with pytest.raises(CapacityError) as caught:
                reservation.allocate(1)
            assert (caught.value.free, caught.value.largest) == (0, 0)
            assert first.address + 8 * KIB == second.address
        assert pool.statistics().allocated == 20 * KIB


def test_all_that_is_free_can_be_reserved(pool: BufferPool) -> None:
    buffers = [pool.allocate(8 * KIB) for _ in range(4)]
    buffers[0].release()
    buffers[2].release()
    with pool.reserve(pool.statistics().free) as reservation:
        state = pool.statistics()
        assert (state.free, state.largest, state.reserved) == (0, 0, 48 * KIB)
        with pytest.raises(CapacityError):
            pool.allocate(1)
        buffer = reservation.allocate(8 * KIB)
        check_pool(pool)
        assert reservation.nbytes == 40 * KIB
    assert pool.statistics().free == 40 * KIB
    buffer.release()
    assert pool.statistics().free == 48 * KIB


def test_no_room_changes_nothing(pool: BufferPool) -> None:
    held = pool.allocate(40 * KIB)
    before = pool.statistics()
    for sizes in (25 * KIB, [8 * KIB] * 4, [pool.capacity]):
        with pytest.raises(CapacityError) as caught:
            pool.reserve(sizes)
        assert caught.value.asked == (sizes if isinstance(sizes, int) else sum(sizes))
        assert caught.value.free == 24 * KIB
        assert pool.statistics() == before
        check_pool(pool)
    held.release()


def test_what_is_left_goes_back(pool: BufferPool) -> None:
    reservation = pool.reserve([8 * KIB, 8 * KIB])
    buffer = reservation.allocate(8 * KIB)
    reservation.release()
    reservation.release()
    assert reservation.released
    assert pool.statistics().free == 56 * KIB
    with pytest.raises(ClosedError):
        reservation.allocate(1)
    buffer.release()
    assert pool.statistics().free == 64 * KIB


def test_a_dropped_reservation_goes_back(pool: BufferPool) -> None:
    reservation = pool.reserve(10 * KIB)
    assert pool.statistics().reserved == 12 * KIB
    del reservation
    gc.collect()
    assert pool.statistics().reserved == 0
    assert pool.statistics().free == 64 * KIB


def test_a_buffer_outlives_its_reservation(pool: BufferPool) -> None:
    with pool.reserve(8 * KIB) as reservation:
        buffer = reservation.allocate(4 * KIB)
        buffer.tensor.fill_(9)
    assert torch.all(buffer.tensor == 9)


def test_nothing_reserved(pool: BufferPool) -> None:
    for nothing in (0, [], [0, 0]):
        with pool.reserve(nothing) as reservation:
            assert reservation.nbytes == 0
            assert reservation.allocate((0, 3)).nbytes == 0
            with pytest.raises(CapacityError):
                reservation.allocate(1)


def test_arguments(pool: BufferPool) -> None:
    for size in (-1, [100, -1], "much"):
        with pytest.raises(UnsupportedError):
            pool.reserve(size)
    with pool.reserve(100) as reservation, pytest.raises(UnsupportedError):
        reservation.allocate(-5)
    assert pool.statistics().free == pool.capacity
