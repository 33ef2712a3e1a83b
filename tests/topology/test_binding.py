"""Binding threads and memory, on this machine."""

import os
import threading

import pytest

from tensorspill import BufferPool, Request, open_engine
from tensorspill.topology import discover
from tensorspill.topology.affinity import Affinity, affinities
from tensorspill.topology.binding import bind_process, bind_thread, bound
from tensorspill.topology.process import current_process
from tests.faults import in_child

CPUS = sorted(os.sched_getaffinity(0))


def policy() -> str:
    """Return the memory policy of a page that this thread touches first."""
    with open("/proc/thread-self/numa_maps") as maps:
        return maps.readline().split()[1]


def has_numa() -> bool:
    return os.path.exists("/proc/thread-self/numa_maps")


def test_a_thread_is_bound_and_those_it_starts_as_well():
    def binding():
        seen = []
        with bound(Affinity(rank=0, cpus=(CPUS[-1], 4000), numa_node=0)) as what:
            thread = threading.Thread(target=lambda: seen.append(os.sched_getaffinity(0)))
            thread.start()
            thread.join()
            inside = os.sched_getaffinity(0)
        return what, inside, seen, os.sched_getaffinity(0)

    what, inside, seen, after = in_child(binding)
    assert what.cpus == (CPUS[-1],)
    assert what.notes == ()
    assert inside == {CPUS[-1]}
    assert seen == [{CPUS[-1]}]
    assert after == set(CPUS)


@pytest.mark.skipif(not has_numa(), reason="this kernel has no NUMA policies to look at")
def test_memory_is_preferred_near_and_the_policy_is_put_back():
    def binding():
        before = policy()
        with bound(Affinity(rank=0, cpus=tuple(CPUS), numa_node=0)) as what:
            during = policy()
        return before, during, policy(), what.numa_node

    before, during, after, node = in_child(binding)
    assert before == after
    assert node == 0
    assert during == "prefer:0"


def test_a_node_that_is_not_there_is_a_note():
    def binding():
        return [
            bind_thread(Affinity(rank=3, cpus=tuple(CPUS), numa_node=n)) for n in (900, 5000, -1)
        ]

    for what in in_child(binding):
        assert what.numa_node is None
        assert "set_mempolicy" in what.notes[0] or "no such node" in what.notes[0]


@pytest.mark.parametrize(
    ("cpus", "why"), [((), "none is known"), ((4000,), "may use none of them")]
)
def test_cpus_that_cant_be_used_are_a_note(cpus, why):
    what = in_child(lambda: bind_thread(Affinity(rank=3, cpus=cpus)))
    assert what.cpus == tuple(CPUS)
    assert "Rank 3" in what.notes[0]
    assert why in what.notes[0]


def test_all_threads_of_a_process():
    def binding():
        stop, seen = threading.Event(), []

        def wait():
            stop.wait()
            seen.append(os.sched_getaffinity(0))

        thread = threading.Thread(target=wait)
        thread.start()
        what = bind_process(Affinity(rank=0, cpus=(CPUS[0],)))
        stop.set()
        thread.join()
        return what, seen

    what, seen = in_child(binding)
    assert len(what.threads) >= 2
    assert seen == [{CPUS[0]}]


def test_engines_and_pools_take_the_ranks_node(tmp_path):
    """The engine's threads run on the node's CPUs, whoever makes it start them."""

    def running():
        (rank,) = affinities(discover(nvml=False), [None], current_process())
        with bound(rank):
            pool = BufferPool("1MiB", numa_node=rank.numa_node)
            engine = open_engine(tmp_path, numa_node=rank.numa_node)
        buffer = pool.allocate((4096,))
        with engine.open("x", "w", size=4096) as file:
            engine.submit([Request(buffer, file, write=True)]).result()
        masks = [os.sched_getaffinity(int(name)) for name in os.listdir("/proc/self/task")]
        engine.close()
        buffer.release()
        pool.close()
        return rank, masks

    rank, masks = in_child(running)
    assert rank.numa_node is not None
    assert all(mask <= set(rank.cpus) for mask in masks)
