"""The table of registrations, against the stand-in for cuFile."""

import gc
import threading

import pytest

from tensorspill.errors import ClosedError
from tensorspill.pool import BufferPool
from tensorspill.pool.cuda.registration import Hold, Registrations
from tests.pool.cuda.checks_driver import in_child
from tests.standin.arrays import DeviceArray, on_device
from tests.standin.control import cuda, cufile

MIB = 1 << 20
BUDGET = 64 * MIB


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    gc.collect()
    assert cufile().gauge("registered buffers") == 0
    assert cuda().gauge("freed while registered") == 0
    assert cuda().gauge("freed in use") == 0


def held(table: Registrations, address: int, device: int, owner: object = None) -> Hold:
    """Hold a registration that must be possible."""
    hold = table.hold(address, device, owner)
    assert hold is not None, table.statistics()
    return hold


def registered() -> int:
    return cufile().gauge("registered buffers")


def test_once_for_an_allocation():
    with Registrations(BUDGET) as table, BufferPool(8 * MIB, "cuda:0") as pool:
        buffers = [pool.allocate(1000) for _ in range(20)]
        holds = [held(table, buffer.address, 0, buffer) for buffer in buffers]
        assert registered() == 1
        state = table.statistics()
        assert (state.allocations, state.held, state.registered) == (1, 1, 1)
        assert state.nbytes == cufile().gauge("pinned bytes")
        for hold in holds:
            hold.release()
            hold.release()
        assert registered() == 1, "our own memory stays registered for the next time"
        assert table.statistics().held == 0
        with held(table, buffers[0].address, 0) as again:
            assert again.nbytes >= 8 * MIB
        assert cufile().count("cuFileBufRegister") == 1
        cufile().reset_counts()


def test_memory_of_others_only_as_long_as_it_is_held():
    with Registrations(BUDGET) as table:
        array = DeviceArray(MIB)
        with held(table, array.address + 100, 0, array):
            assert registered() == 1
            with held(table, array.address, 0, array):
                pass
            assert registered() == 1
        assert registered() == 0
        hold = held(table, array.address, 0, array)
        del array, hold
        gc.collect()
        assert registered() == 0


def test_the_least_recently_used_makes_room():
    pools = [BufferPool(8 * MIB, "cuda:0") for _ in range(4)]
    places = [pool.slab.address for pool in pools]
    with Registrations(3 * 9 * MIB) as table:
        for place in (places[0], places[1], places[2], places[0]):
            with held(table, place, 0):
                pass
        assert registered() == 3
        with held(table, places[3], 0):
            pass
        assert registered() == 3
        assert table.statistics().evicted == 1
        # 1 was the least recently used; 0 and 2 are there still.
        before = table.statistics().registered
        with held(table, places[0], 0), held(table, places[2], 0):
            assert table.statistics().registered == before
            # What is held is not evicted.
            with held(table, places[1], 0):
                assert table.hold(places[3], 0) is None
        state = table.statistics()
        assert state.nbytes <= state.budget
        assert any("is in use" in why for why in state.refused)
        assert table.hold(BufferPool(64 * MIB, "cuda:0").slab.address, 0) is None
        assert any("larger than the budget" in why for why in table.statistics().refused)
    for pool in pools:
        pool.close()


def test_deregistered_before_it_is_freed():
    with Registrations(BUDGET) as table:
        for _ in range(10):
            pool = BufferPool(MIB, "cuda:0")
            held(table, pool.slab.address, 0).release()
            assert registered() == 1
            pool.close()
            del pool
            gc.collect()
            assert registered() == 0


def test_no_leak_over_a_thousand_cycles():
    with Registrations(BUDGET) as table, BufferPool(MIB, "cuda:0") as pool:
        array = DeviceArray(MIB)
        before = cuda().gauge("bytes"), cuda().gauge("events"), cuda().gauge("streams")
        for _ in range(1000):
            with pool.allocate(1000) as buffer, held(table, buffer.address, 0, buffer):
                pass
            with held(table, array.address, 0, array):
                pass
        assert registered() == 1
        after = cuda().gauge("bytes"), cuda().gauge("events"), cuda().gauge("streams")
        assert after == before
        assert table.statistics().registered >= 1001


@pytest.mark.parametrize("code", [5010, 5022, 5036])
def test_cufile_refuses(code):
    with Registrations(BUDGET) as table, BufferPool(MIB, "cuda:0") as pool:
        before = sum(table.statistics().refused.values())
        with cufile().failing(f"cuFileBufRegister={code}"):
            assert table.hold(pool.slab.address, 0) is None
        assert sum(table.statistics().refused.values()) == before + 1
        assert table.hold(pool.slab.address, 0) is not None


def test_a_full_window_is_emptied_of_what_is_idle():
    with Registrations(BUDGET) as table:
        pools = [BufferPool(MIB, "cuda:0") for _ in range(3)]
        for pool in pools[:2]:
            held(table, pool.slab.address, 0).release()
        with cufile().failing("cuFileBufRegister=5036x2"):
            hold = held(table, pools[2].slab.address, 0)
        hold.release()
        assert table.statistics().allocations == 1
        for pool in pools:
            pool.close()
        del pool, pools


def test_somebody_else_registered_it():
    from kvikio.buffer import memory_deregister, memory_register

    with Registrations(BUDGET) as table:
        array = DeviceArray(MIB)
        with on_device():
            memory_register(array)
            assert table.hold(array.address, 0, array) is None
            assert registered() == 1, "it is not ours to undo"
            memory_deregister(array)


def test_not_gpu_memory():
    with Registrations(BUDGET) as table:
        assert table.hold(0x1000, 0) is None
        assert "not GPU memory" in table.statistics().refused


def test_several_users():
    one, other = Registrations(4 * MIB), Registrations(BUDGET)
    pool = BufferPool(8 * MIB, "cuda:0")
    held(one, pool.slab.address, 0).release()
    one.close()
    one.close()
    assert registered() == 1
    with pytest.raises(ClosedError):
        held(one, pool.slab.address, 0)
    other.close()
    assert registered() == 0
    dropped = Registrations(BUDGET)
    held(dropped, pool.slab.address, 0).release()
    del dropped
    gc.collect()
    assert registered() == 0
    pool.close()


def test_from_many_threads():
    with Registrations(BUDGET) as table:
        start = threading.Barrier(8)
        failures: list[BaseException] = []

        def work() -> None:
            start.wait()
            try:
                for _ in range(50):
                    with BufferPool(MIB, "cuda:0") as pool:
                        buffer = pool.allocate(100)
                        with held(table, buffer.address, 0, buffer):
                            pass
                        del buffer
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        gc.collect()
        assert table.statistics().allocations == registered()


def test_a_forked_child():
    with Registrations(BUDGET) as table, BufferPool(MIB, "cuda:0") as pool:
        hold = held(table, pool.slab.address, 0)

        def check() -> None:
            with pytest.raises(ClosedError):
                held(table, pool.slab.address, 0)
            hold.release()
            table.close()
            pool.close()

        in_child(check)
        assert registered() == 1
        hold.release()
