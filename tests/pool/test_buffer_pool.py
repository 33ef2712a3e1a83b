"""The pool: memory that nobody shares, accounts that add up, waits, ends."""

import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from tensorspill.errors import BusyError, CapacityError, ClosedError, UnsupportedError
from tensorspill.pool import BufferPool, ExtentAllocator
from tensorspill.pool.live import live_ranges
from tests.pool.helpers import RandomAllocator, check_pool

KIB = 1024
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype) and "q" not in str(d)}, key=str
)


@pytest.fixture
def pool() -> Iterator[BufferPool]:
    with BufferPool(64 * KIB, poison=True) as pool:
        yield pool
        check_pool(pool)


def fresh(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8)


def until_waiting(pool: BufferPool) -> None:
    """Return when a thread waits for room."""
    for _ in range(10_000):
        if pool.statistics().waits:
            return
        time.sleep(0.001)
    pytest.fail("nobody waits")


# -- what a buffer is ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype(pool: BufferPool, dtype: torch.dtype) -> None:
    buffer = pool.allocate((3, 5), dtype)
    tensor = buffer.tensor
    assert tensor.dtype == dtype
    assert tuple(tensor.shape) == (3, 5)
    assert tensor.is_contiguous()
    assert buffer.nbytes == tensor.nbytes == 15 * dtype.itemsize
    assert buffer.address == tensor.data_ptr()
    assert buffer.address % 4096 == 0
    assert buffer.device == tensor.device == torch.device("cpu")
    expected = fresh(buffer.nbytes)
    tensor.reshape(-1).view(torch.uint8).copy_(expected)
    assert torch.equal(buffer.tensor.reshape(-1).view(torch.uint8), expected)


@pytest.mark.parametrize("shape", [7, (), (2, 3, 4), [5], torch.Size([2, 2]), (np.int64(3), True)])
def test_any_shape(pool: BufferPool, shape: int) -> None:
    tensor = pool.allocate(shape, torch.float32).tensor
    assert tensor.shape == torch.empty(shape).shape


@pytest.mark.parametrize("shape", [0, (0, 4), (3, 0, 2)])
def test_no_elements_take_no_memory(pool: BufferPool, shape: int) -> None:
    everything = pool.allocate(pool.capacity)
    with pool.allocate(shape, torch.bfloat16) as buffer:
        assert buffer.tensor.shape == torch.empty(shape).shape
        assert buffer.tensor.dtype == torch.bfloat16
        assert buffer.nbytes == 0
        assert pool.statistics().buffers == 1
    assert buffer.released
    everything.release()


def test_a_buffer_has_a_storage_of_its_own(pool: BufferPool) -> None:
    pool.allocate(100)
    tensor = pool.allocate((10, 10), torch.int16).tensor
    assert tensor.untyped_storage().nbytes() == 200
    assert tensor.storage_offset() == 0


def test_autograd_takes_it(pool: BufferPool) -> None:
    parameter = torch.nn.Parameter(pool.allocate((4, 4), torch.float32).tensor.fill_(2))
    (parameter**2).sum().backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, torch.full((4, 4), 4.0))


@pytest.mark.parametrize("shape", [-1, (2, -3), 1.5, "ab", None, ((1,),)])
def test_bad_shapes(pool: BufferPool, shape: int) -> None:
    with pytest.raises(UnsupportedError):
        pool.allocate(shape)


@pytest.mark.parametrize("dtype", ["uint8", None, np.float32])
def test_bad_dtypes(pool: BufferPool, dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError):
        pool.allocate(4, dtype)


# -- release ---------------------------------------------------------------------------------------


def test_release(pool: BufferPool) -> None:
    with pool.allocate(5000) as buffer:
        view = buffer.tensor
        view.fill_(1)
    buffer.release()
    assert buffer.released
    with pytest.raises(ClosedError, match="released"):
        _ = buffer.tensor
    # Poisoned, so that use after release shows.
    assert torch.all(view == 0xFF)
    assert pool.statistics().free == pool.capacity
    assert "released" in repr(buffer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2], ids=str)
def test_poison_is_nan(pool: BufferPool, dtype: torch.dtype) -> None:
    assert torch.all(torch.isnan(pool.allocate(100, dtype).tensor.float()))


def test_release_under_a_live_transfer_is_refused(pool: BufferPool) -> None:
    buffer, other = pool.allocate(5000), pool.allocate(5000)
    buffer.tensor.fill_(3)
    token = live_ranges.add(np.array([buffer.address + 4999]), np.array([1]))
    try:
        with pytest.raises(BusyError):
            buffer.release()
        with pytest.raises(BusyError):
            pool.close()
        assert torch.all(buffer.tensor == 3)
        other.release()
    finally:
        live_ranges.remove(token)
    buffer.release()
    assert pool.statistics().allocated == 0


def test_a_dropped_buffer_comes_back_when_no_tensor_uses_it(pool: BufferPool) -> None:
    view = pool.allocate((100, 50), torch.float32).tensor[3:].t()
    gc.collect()
    assert pool.statistics().buffers == 1
    del view
    gc.collect()
    assert pool.statistics().buffers == 0
    assert pool.statistics().free == pool.capacity


def test_a_dropped_buffer_stays_while_a_transfer_holds_its_storage(pool: BufferPool) -> None:
    storage = pool.allocate(5000).tensor.untyped_storage()
    gc.collect()
    assert pool.statistics().buffers == 1
    del storage
    assert pool.statistics().buffers == 0


def test_a_dropped_buffer_wakes_who_waits(pool: BufferPool) -> None:
    tensor = pool.allocate(pool.capacity).tensor
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.allocate, 100, block=True)
        until_waiting(pool)
        del tensor
        assert waiting.result(10).nbytes == 100


def test_two_threads_release_one_buffer(pool: BufferPool) -> None:
    with ThreadPoolExecutor(2) as executor:
        for _ in range(200):
            buffer = pool.allocate(100)
            barrier = threading.Barrier(2)

            def release() -> None:
                barrier.wait()  # noqa: B023
                buffer.release()  # noqa: B023

            for future in [executor.submit(release) for _ in range(2)]:
                future.result()
            check_pool(pool)
    assert pool.statistics().buffers == 0


# -- capacity --------------------------------------------------------------------------------------


def test_full(pool: BufferPool) -> None:
    buffers = [pool.allocate(8 * KIB) for _ in range(8)]
    buffers[1].release()
    buffers[4].release()
    before = pool.statistics()
    with pytest.raises(CapacityError) as caught:
        pool.allocate(9 * KIB)
    error = caught.value
    assert (error.asked, error.free, error.largest) == (9 * KIB, 16 * KIB, 8 * KIB)
    assert "Release buffers" in str(error)
    assert pool.statistics() == before


def test_sizes_as_text_and_rounding() -> None:
    with BufferPool("10 KB") as pool:
        assert pool.capacity == 12 * KIB
        assert pool.allocate(12 * KIB).nbytes == 12 * KIB
    with BufferPool(100, alignment=64) as pool:
        assert pool.capacity == 128
        assert pool.allocate(64).address % 64 == pool.allocate(64).address % 64 == 0
    with BufferPool(0) as pool, pytest.raises(CapacityError):
        pool.allocate(1)


def test_large_alignment_holds_for_addresses() -> None:
    with BufferPool(1 << 20, alignment=1 << 18) as pool:
        assert all(pool.allocate(1).address % (1 << 18) == 0 for _ in range(4))


def test_placing_at_random() -> None:
    with BufferPool(64 * KIB, allocator=RandomAllocator(64 * KIB, seed=5)) as pool:
        addresses = [pool.allocate(4 * KIB).address for _ in range(4)]
        assert addresses != sorted(addresses) or addresses[0] != pool.slab.address
        check_pool(pool)


def test_arguments() -> None:
    for device in ("cuda:99", "meta", "nonsense"):
        with pytest.raises(UnsupportedError):
            BufferPool(4096, device)
    for alignment in (0, -4, 3, 32, 4 << 20):
        with pytest.raises(UnsupportedError):
            BufferPool(4096, alignment=alignment)
    for nbytes in (-1, "much"):
        with pytest.raises(UnsupportedError):
            BufferPool(nbytes)
    with pytest.raises(UnsupportedError):
        BufferPool(4096, allocator=ExtentAllocator(8192))
    used = ExtentAllocator(8192)
    used.allocate(1)
    with pytest.raises(UnsupportedError):
        BufferPool(8192, allocator=used)


# -- waiting ---------------------------------------------------------------------------------------


def test_waiting_for_a_release(pool: BufferPool) -> None:
    held = [pool.allocate(32 * KIB) for _ in range(2)]
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.allocate, 64 * KIB, block=True)
        until_waiting(pool)
        held[0].release()
        assert not waiting.done()
        held[1].release()
        assert waiting.result(10).nbytes == 64 * KIB
    assert pool.statistics().waits == 1


def test_waiting_ends_at_the_timeout(pool: BufferPool) -> None:
    held = pool.allocate(pool.capacity)
    for timeout in (0, 0.01, -1):
        with pytest.raises(CapacityError):
            pool.allocate(1, block=True, timeout=timeout)
    held.release()


def test_waiting_for_what_never_fits_fails_at_once(pool: BufferPool) -> None:
    for shape in (pool.capacity + 1, (1 << 62, 1 << 62)):
        with pytest.raises(CapacityError):
            pool.allocate(shape, block=True)


def test_waiting_ends_when_the_pool_closes() -> None:
    pool = BufferPool(4096)
    held = pool.allocate(4096)
    with ThreadPoolExecutor(1) as executor:
        waiting = executor.submit(pool.allocate, 1, block=True)
        until_waiting(pool)
        pool.close()
        with pytest.raises(ClosedError):
            waiting.result(10)
    assert held.released


def test_interrupt_ends_a_wait(pool: BufferPool) -> None:
    held = pool.allocate(pool.capacity)

    def interrupt() -> None:
        until_waiting(pool)
        signal.raise_signal(signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pool.allocate(1, block=True)
    thread.join()
    held.release()
    assert pool.allocate(pool.capacity).nbytes == pool.capacity


def test_many_threads_share_nothing() -> None:
    with BufferPool(256 * KIB, poison=True) as pool:

        def work(seed: int) -> None:
            chance = np.random.default_rng(seed)
            for _ in range(100):
                nbytes = int(chance.integers(1, 100 * KIB))
                with pool.allocate(nbytes, block=True) as buffer:
                    buffer.tensor.fill_(seed)
                    assert torch.all(buffer.tensor == seed)

        with ThreadPoolExecutor(6) as executor:
            for future in [executor.submit(work, seed) for seed in range(1, 7)]:
                future.result(60)
        check_pool(pool)
        assert pool.statistics().free == pool.capacity


# -- the end ---------------------------------------------------------------------------------------


def test_close() -> None:
    pool = BufferPool(64 * KIB)
    buffer = pool.allocate(5000)
    expected = fresh(5000)
    tensor = buffer.tensor.copy_(expected)
    reservation = pool.reserve(4096)
    pool.close()
    pool.close()
    assert pool.closed
    assert buffer.released
    assert reservation.released
    with pytest.raises(ClosedError, match="pool is closed"):
        _ = buffer.tensor
    for call in (pool.allocate, pool.reserve, reservation.allocate):
        with pytest.raises(ClosedError):
            call(1)
    buffer.release()
    reservation.release()
    assert pool.statistics().capacity == 64 * KIB
    del pool, buffer
    gc.collect()
    assert torch.equal(tensor, expected), "memory that a tensor uses stays valid"


def test_a_forked_child_can_not_use_the_pool(pool: BufferPool) -> None:
    buffer = pool.allocate(4096)
    buffer.tensor.fill_(5)
    # As if another thread were in the pool at the moment of the fork.
    with pool._arena.changed:
        child = os.fork()
        if child == 0:
            good = bool(torch.all(buffer.tensor == 5))
            for call in (lambda: pool.allocate(1), lambda: pool.reserve(1), pool.statistics):
                try:
                    call()
                    good = False
                except ClosedError:
                    pass
            buffer.tensor.fill_(6)
            buffer.release()
            pool.close()
            os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.all(buffer.tensor == 5)
