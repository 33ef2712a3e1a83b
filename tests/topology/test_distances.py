"""Distances between devices, against what nvidia-smi prints of these machines."""

from dataclasses import replace

import pytest
from hypothesis import given

from tensorspill.topology import Drive, Machine, NumaNode
from tensorspill.topology.distances import CLASSES, Distance, distance, nearest
from tensorspill.topology.machines import machine, names
from tests.topology.trees import machines


def labels(name: str, gpu: int, kind: str) -> list[str]:
    whole = machine(name)
    return [distance(whole, whole.gpus[gpu], other).label for other in getattr(whole, kind)]


def test_dgx_a100():
    """Of NCCL's issue 1505: both NICs of a pair are PXB, others SYS, GPUs NV12."""
    assert labels("dgx-a100", 0, "nics") == ["PXB", "PXB", *["SYS"] * 6]
    assert labels("dgx-a100", 2, "nics") == ["SYS", "SYS", "PXB", "PXB", *["SYS"] * 4]
    assert labels("dgx-a100", 0, "gpus") == ["X", *["NV12"] * 7]
    numa = [gpu.numa_node for gpu in machine("dgx-a100").gpus]
    assert numa == [3, 3, 1, 1, 7, 7, 5, 5]


def test_dgx_2():
    """Of nccl-tests' issue 78: the own NIC is PIX, the next PXB, those of the other root NODE."""
    assert labels("dgx-2", 0, "nics") == ["PIX", "PXB", "NODE", "NODE", *["SYS"] * 4]
    assert labels("dgx-2", 2, "nics") == ["PXB", "PIX", "NODE", "NODE", *["SYS"] * 4]
    assert labels("dgx-2", 0, "gpus")[1:] == ["NV6"] * 15


def test_clouds():
    assert labels("aws-p5", 0, "nics") == [*["PIX"] * 4, *["PHB"] * 12, *["SYS"] * 16]
    assert labels("azure-nd-a100-v4", 0, "nics")[:4] == ["PIX", "PIX", "SYS", "SYS"]
    numa = [gpu.numa_node for gpu in machine("azure-nd-a100-v4").gpus]
    assert numa == [1, 1, 0, 0, 3, 3, 2, 2]
    whole = machine("hgx-h100-vm")
    assert whole.gpus[0].bdf == "0000:a4:00.0"
    for gpu in whole.gpus:
        _, (nic,) = nearest(whole, gpu, whole.nics)
        assert nic.name == f"mlx5_{7 - whole.gpus.index(gpu)}"


def test_grace():
    assert labels("gb200", 0, "gpus") == ["X", "NV18", "NV18", "NV18"]
    whole = machine("gb200")
    assert [gpu.memory_node for gpu in whole.gpus] == [2, 10, 18, 26]
    assert [gpu.numa_node for gpu in whole.gpus] == [0, 0, 1, 1]
    assert len(machine("gh200x4").nodes) == 36


def test_adversarial_numbers():
    assert [gpu.numa_node for gpu in machine("adversarial").gpus] == [0, 0, 0, 1, 2]
    assert labels("adversarial", 0, "gpus") == ["X", "PIX", "PIX", "SYS", "SYS"]
    assert labels("adversarial", 4, "drives") == ["PHB"]


@given(machines())
def test_distances_are_symmetric_and_known(whole):
    devices = whole.devices
    for a in devices:
        for b in devices:
            there, back = distance(whole, a, b), distance(whole, b, a)
            assert there.kind == back.kind
            assert there.kind in CLASSES
            assert (there.kind == "X") == (a is b)
            assert (there.kind == "?") == bool(there.reason)
            known = a.numa_node is not None and b.numa_node is not None
            assert there.kind != "?" or not known


@pytest.mark.parametrize("name", names())
def test_nothing_is_unknown_on_known_machines(name):
    whole = machine(name)
    devices = whole.devices
    assert all(distance(whole, a, b).kind != "?" for a in devices for b in devices)


def test_unknown_says_why():
    a = Drive(name="a", bdf="0000:01:00.0", unknown=(("numa_node", "numa_node says -1"),))
    b = Drive(name="b", bdf="0000:02:00.0", numa_node=1)
    two = Machine(nodes=(NumaNode(index=0, cpus=(0,)), NumaNode(index=1, cpus=(1,))), drives=(a, b))
    found = distance(two, a, b)
    assert (found.kind, found.reason) == ("?", "NUMA node of 0000:01:00.0: numa_node says -1")
    # Where there is one node only, it can be no other; memory-only nodes don't count.
    one = replace(two, nodes=(NumaNode(index=0, cpus=(0,)), NumaNode(index=1)))
    assert distance(one, a, b).kind == "NODE"
    assert distance(one, replace(a, bdf=None), b).kind == "?"


def test_nearest():
    whole = machine("dgx-2")
    near, (drive,) = nearest(whole, whole.gpus[3], whole.drives)
    assert (near.kind, drive.name) == ("PIX", "nvme1n1")
    near, drives = nearest(whole, 1, whole.drives)
    assert (near.kind, [d.name for d in drives]) == ("NODE", [f"nvme{i}n1" for i in range(4, 8)])
    near, drives = nearest(whole, None, whole.drives)
    assert near.kind == "?"
    assert len(drives) == 8
    assert nearest(whole, whole.gpus[0], []) == (Distance(kind="?", reason="there is none"), ())
