"""Trees of sysfs, and machines made of random parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from tensorspill.topology import Machine, discover
from tensorspill.topology.machines.builder import Builder, link
from tensorspill.topology.machines.sysfs_tree import write_sysfs
from tensorspill.topology.machines.xml_tree import nccl_xml

#: What only NVML, a measurement or a person says.
_NOT_IN_SYSFS = ("nvlinks", "memory_node", "write_mbps", "read_mbps", "synthetic", "name")


def is_virtual(machine: Machine) -> bool:
    """Whether its PCIe tree is known from a topology file, and not from sysfs."""
    return any(bridge.name.startswith("cpu") for bridge in machine.bridges)


def seen(machine: Machine, root: Path, **options: Any) -> Machine:
    """Write a machine's sysfs (and NCCL's file, for a virtual one), and discover it there."""
    virtual = is_virtual(machine)
    write_sysfs(machine, str(root), flat=virtual)
    if virtual:
        options["topology_file"] = str(root / "topology.xml")
        (root / "topology.xml").write_text(nccl_xml(machine))
    return discover(str(root), environ={}, **options)


def facts(machine: Machine, *kinds: str) -> dict[str, Any]:
    """Return what a machine is known to have, of some kinds of parts, as sysfs can tell it."""
    whole = machine.to_json()
    return {kind: [_plain(item) for item in whole.get(kind, [])] for kind in kinds}


def _plain(item: dict[str, Any]) -> dict[str, Any]:
    unknown = {"unknown", *_NOT_IN_SYSFS} - ({"name"} if "index" not in item else set())
    if "nvlinks" in item or "memory_node" in item or "uuid" in item or "index" in item:
        unknown |= {"memory_bytes"} if "bdf" in item else set()
    return {key: value for key, value in item.items() if key not in unknown}


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Machines of 1 to 4 NUMA nodes, with trees of switches, in any numbers."""
    builder = Builder("random", link(draw(st.sampled_from([3, 4, 5]))))
    buses = iter(range(1, 0x100))
    count = draw(st.integers(1, 4))
    for node in range(count):
        builder.node(node, f"{4 * node}-{4 * node + 3}", node // draw(st.integers(1, 2)), 4)
    for number in range(draw(st.integers(1, 4))):
        where = draw(st.none() | st.integers(0, count - 1))
        places = [builder.host(f"pci{number:04x}:00", where)]
        for _ in range(draw(st.integers(0, 3))):
            places.append(builder.switch(draw(st.sampled_from(places))))
        for index in range(draw(st.integers(0, 4))):
            kind = draw(st.sampled_from(["gpu", "nic", "drive"]))
            above, bdf = draw(st.sampled_from(places)), f"{number + 1:04x}:{next(buses):02x}:00.0"
            if kind == "gpu":
                builder.gpu(above, bdf)
            elif kind == "nic":
                name = f"mlx5_{number}_{index}"
                builder.nic(above, bdf, name, draw(st.sampled_from(["infiniband", "roce"])), 200)
            else:
                builder.drive(above, bdf, 1000, 4)
    return builder.build()
