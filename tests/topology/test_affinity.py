"""What is near each rank, and what it costs to be far."""

import logging
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given

from tensorspill.errors import UnsupportedError
from tensorspill.topology import discover
from tensorspill.topology.affinity import Affinity, affinities, crossing, warn_if_crossing
from tensorspill.topology.discovery import Storage, storage_of
from tensorspill.topology.machines import machine, names
from tensorspill.topology.process import Process, VisibleGpu, current_process
from tests.topology.trees import machines


@pytest.mark.parametrize("name", names())
def test_every_rank_of_known_machines_has_a_place(name):
    whole = machine(name)
    found = affinities(whole)
    assert [rank.rank for rank in found] == list(range(len(whole.gpus)))
    for rank, gpu in zip(found, whole.gpus, strict=True):
        assert rank.gpu == gpu.bdf
        assert rank.numa_node == gpu.numa_node
        assert rank.socket is not None
        near = whole.node(gpu.numa_node)
        assert near is not None
        assert rank.cpus == near.cpus
        assert rank.nic in rank.nics
        assert rank.drive in rank.drives
        assert Affinity.parse(rank.dump()) == rank


@pytest.mark.parametrize("name", names())
def test_ranks_are_spread_over_what_is_equally_near(name):
    found = affinities(machine(name))
    for pick, near in (("nic", "nics"), ("drive", "drives")):
        groups: dict[tuple[str, ...], Counter[str]] = {}
        for rank in found:
            groups.setdefault(getattr(rank, near), Counter())[getattr(rank, pick)] += 1
        for choice, counts in groups.items():
            used = [counts[item] for item in choice]
            assert max(used) - min(used) <= 1


@given(machines())
def test_every_rank_resolves_to_one_device_or_unknown_with_a_reason(whole):
    for rank in affinities(whole):
        for field in ("gpu", "nic", "drive", "numa_node", "socket"):
            assert getattr(rank, field) is not None or rank.why(field)


def test_the_processs_cpus_are_kept():
    whole = machine("dgx-a100")
    first = affinities(whole, [0], Process(cpus=(0, 48, 50, 200)))[0]
    assert first.cpus == (48, 50)
    # An empty intersection says that the launcher knows better.
    assert affinities(whole, [0], Process(cpus=(0, 1)))[0].cpus == (0, 1)


def test_ranks_without_a_gpu_are_where_their_cpus_are():
    whole = machine("dgx-h100")
    (rank,) = affinities(whole, [None], Process(cpus=tuple(range(60, 70))))
    assert (rank.gpu, rank.numa_node, rank.socket) == (None, 1, 1)
    assert rank.why("gpu") == "the rank has no GPU"
    assert (rank.nic_distance, rank.drive_distance) == ("NODE", "NODE")
    assert rank.drives == ("nvme4n1", "nvme5n1", "nvme6n1", "nvme7n1")
    (lost,) = affinities(whole, [None], Process(cpus=(0, 60)))
    assert lost.numa_node is None
    assert lost.why("numa_node") == "the rank may run on several NUMA nodes"
    assert lost.why("socket")


def test_this_machine():
    process = current_process()
    found = affinities(discover(nvml=False), [None, None], process)
    assert all(set(rank.cpus) <= set(process.cpus) for rank in found)
    assert all(rank.cpus for rank in found)


def test_nics_that_are_down_are_not_taken():
    whole = machine("dgx-h100")
    down = tuple(replace(nic, up=False) if nic.name == "mlx5_0" else nic for nic in whole.nics)
    assert affinities(replace(whole, nics=down))[0].nic_distance == "NODE"
    none = affinities(replace(whole, nics=(), drives=()))[0]
    assert (none.nic, none.drive) == (None, None)
    assert "no NIC that is up" in none.why("nic")


def test_a_rank_without_a_device_is_named():
    whole = machine("dgx-h100")
    with pytest.raises(UnsupportedError, match=r"Rank 1: .*no GPU is 9"):
        affinities(whole, [0, 9])
    with pytest.raises(UnsupportedError, match="Rank 0: dgx-h100 has no GPU 0000:99:00.0"):  # noqa: RUF043
        affinities(whole, [VisibleGpu(bdf="0000:99:00.0")])


def test_two_ranks_on_one_gpu_are_named():
    whole = machine("dgx-h100")
    with pytest.raises(
        UnsupportedError, match=f"Ranks 1 and 3 have the same GPU {whole.gpus[5].bdf}"
    ):
        affinities(whole, [0, 5, 2, 5])
    assert len(affinities(whole, [5, 5], share=True)) == 2
    # Slices of one GPU are different devices.
    slices = [VisibleGpu(bdf=whole.gpus[0].bdf, mig=f"MIG-{i}") for i in (0, 1, 1)]
    assert [rank.mig for rank in affinities(whole, slices[:2])] == ["MIG-0", "MIG-1"]
    with pytest.raises(UnsupportedError, match="Ranks 1 and 2 have the same slice MIG-1"):
        affinities(whole, slices)


def test_a_device_that_cant_be_told_stays_unknown():
    unknown = VisibleGpu(unknown=(("bdf", "GPUs of several models"),))
    (rank,) = affinities(machine("dgx-h100"), [unknown])
    assert rank.gpu is None
    assert rank.why("gpu") == "GPUs of several models"


def test_writing_across_sockets_names_the_cost(caplog):
    whole = machine("dgx-h100")
    nodes = tuple(
        replace(n, distances=d) for n, d in zip(whole.nodes, ((10, 21), (21, 10)), strict=True)
    )
    whole = replace(whole, nodes=nodes)
    rank = affinities(whole)[5]
    near = Storage(path="/near", drives=("nvme4n1", "nvme5n1"))
    far = Storage(path="/far", drives=("nvme0n1",))
    both = storage_of(whole, "/raid/checkpoints")
    assert crossing(whole, rank, near) is None
    text = crossing(whole, rank, far) or ""
    assert "Rank 5 is on socket 1, but 100% of what it writes to /far" in text
    assert "2.1 times as far" in text
    assert "(SYS)" in text
    assert "nvme5n1 would be nearer (PXB)" in text
    with caplog.at_level(logging.WARNING):
        assert "50% of what it writes to /raid/checkpoints" in (
            warn_if_crossing(whole, rank, both) or ""
        )
    assert len(caplog.records) == 1


def test_no_warning_where_nothing_is_known():
    whole = machine("dgx-h100")
    rank = affinities(whole)[0]
    assert crossing(whole, rank, Storage(path="/tmp", kind="memory")) is None
    lost = replace(whole, drives=tuple(replace(d, numa_node=None) for d in whole.drives))
    assert crossing(lost, rank, Storage(path="/raid", drives=("nvme7n1",))) is None
    assert (
        crossing(whole, replace(rank, socket=None), Storage(path="/", drives=("nvme7n1",))) is None
    )
