"""Known machines hold what is known, mark what is made up, and make clusters of any size."""

from collections import Counter

import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.topology import Machine
from tensorspill.topology.discovery.sysfs import link_mbps
from tensorspill.topology.machines import cluster, machine, names
from tensorspill.topology.machines.rates import link_of_rate

#: Sockets, NUMA nodes with CPUs, those without, GPUs, NICs, and GPUs and NICs of a switch.
SHAPES = {
    "dgx-2": (2, 2, 0, 16, 8, {(2, 1)}),
    "dgx-a100": (2, 8, 0, 8, 8, {(2, 0), (0, 2)}),
    "dgx-h100": (2, 2, 0, 8, 8, {(1, 0), (0, 1)}),
    "azure-nd-a100-v4": (2, 4, 0, 8, 8, {(2, 2)}),
    "azure-nd-h100-v5": (2, 2, 0, 8, 8, {(1, 1)}),
    "aws-p4d": (2, 2, 0, 8, 4, {(2, 1)}),
    "aws-p5": (2, 2, 0, 8, 32, {(1, 4)}),
    "hgx-h100-vm": (2, 2, 0, 8, 8, {(1, 1)}),
    "gb200": (2, 2, 4, 4, 4, set()),
    "gh200x4": (4, 4, 32, 4, 4, set()),
    "gcp-a3": (2, 2, 0, 8, 4, {(2, 1)}),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name):
    whole = machine(name)
    gpus = Counter(whole.switch_of(gpu) for gpu in whole.gpus)
    nics = Counter(whole.switch_of(nic) for nic in whole.nics)
    switches = {name: (gpus[name], nics[name]) for name in {*gpus, *nics} if name}
    memory_only = sum(node.memory_only for node in whole.nodes)
    assert (
        len(whole.sockets), len(whole.nodes) - memory_only, memory_only, len(whole.gpus),
        len(whole.nics), set(switches.values()),
    ) == SHAPES[name]  # fmt: skip


@pytest.mark.parametrize("name", names())
def test_machines_are_consistent(name):
    whole = machine(name)
    assert whole.hostname == name
    addresses = Counter([d.bdf for d in whole.devices] + [b.name for b in whole.bridges])
    assert max(addresses.values()) == 1
    cpus = [cpu for node in whole.nodes for cpu in node.cpus]
    assert sorted(cpus) == list(range(len(cpus)))
    bridges = {bridge.name for bridge in whole.bridges}
    assert {b.parent for b in whole.bridges} - {""} <= bridges
    for device in whole.devices:
        assert device.parent in bridges or (device.parent is None and device.why("parent"))
        assert device.numa_node in {node.index for node in whole.nodes}


@pytest.mark.parametrize("name", names())
def test_made_up_drives_are_marked(name):
    whole = machine(name)
    assert whole.drives
    assert all(drive.synthetic for drive in whole.drives)
    assert any("made up" in note for note in whole.notes)


def test_clusters():
    found = cluster("dgx-h100", 64)
    assert len(found) == 64
    assert len({node.hostname for node in found}) == 64
    assert found[63].gpus is found[0].gpus
    assert found[0].to_json() | {"hostname": ""} == found[9].to_json() | {"hostname": ""}
    assert Machine.parse(found[5].dump()) == found[5]
    mixed = cluster({"dgx-h100": 4, "dgx-2": 2})
    assert [len(node.gpus) for node in mixed] == [8, 8, 8, 8, 16, 16]
    order = cluster(["dgx-2", machine("plain"), "dgx-2"])
    assert [len(node.gpus) for node in order] == [16, 1, 16]
    assert cluster("gb200", 0) == cluster({}) == ()
    assert len(cluster("plain")) == 1


def test_large_clusters_are_small():
    found = cluster("dgx-2", 20_000)
    assert len({id(node.gpus) for node in found}) == 1
    assert found[0].sockets is found[0].sockets


def test_wrong_clusters():
    with pytest.raises(UnsupportedError, match="No machine is known as 'dgx-9'; known are dgx-2, "):
        cluster("dgx-9", 4)
    with pytest.raises(UnsupportedError, match="-1 nodes"):
        cluster("dgx-2", -1)
    with pytest.raises(UnsupportedError, match="-3 nodes"):
        cluster({"dgx-2": -3})
    with pytest.raises(UnsupportedError, match="one kind"):
        cluster(["dgx-2"], 3)


@pytest.mark.parametrize("lanes", ["1", "4", "8", "16"])
@pytest.mark.parametrize("speed", ["8.0", "16.0", "32.0", "64.0"])
def test_rates_of_links(speed, lanes):
    rate = link_mbps(f"{speed} GT/s PCIe", lanes)
    assert rate is not None
    assert link_mbps(*link_of_rate(rate)) == rate
    with pytest.raises(UnsupportedError, match=f"No PCIe link carries {rate + 7} MB/s"):
        link_of_rate(rate + 7)


def test_spellings_of_links():
    assert link_mbps("8 GT/s", "16") == link_mbps("8.0 GT/s PCIe", "16") == 15760
    for speed, width in (
        ("Unknown", "16"),
        ("16.0 GT/s PCIe", "0"),
        ("16.0 GT/s PCIe", "255"),
        ("", ""),
    ):
        assert link_mbps(speed, width) is None
