"""Adding to a machine what a topology file says of it.

Virtual machines show each device below a host bridge of its own, with no NUMA node; the provider's
file says how they are really connected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from tensorspill.topology.machine import Bridge, Device, Drive, Gpu, Machine, Nic, NumaNode

__all__ = ["merged"]

AnyDevice = TypeVar("AnyDevice", Gpu, Nic, Drive)


def merged(machine: Machine, described: Machine) -> Machine:
    """Return a machine with the PCIe tree of a description of it, joined by PCI address.

    Devices that the description lacks, such as drives, keep their place; those that the machine
    lacks are left out, since a file describes every size of a machine.
    """
    above: dict[str | None, Device] = {d.bdf: d for d in described.devices if d.bdf}
    nodes = _nodes(machine, described)
    # The kernel's CPUs of a node, not the file's: those are known to be wrong at times.
    cpus = {node.index: node.cpus for node in nodes}
    gpus = tuple(_moved(gpu, above.get(gpu.bdf), cpus) for gpu in machine.gpus)
    moved = (
        *(nic.bdf for nic in machine.nics if nic.bdf in above),
        *(gpu.bdf for gpu in machine.gpus if gpu.bdf in above),
    )
    note = f"{described.source} places {len(set(moved))} devices"
    return replace(
        machine,
        source=f"{machine.source} and {described.source}",
        nodes=nodes,
        bridges=_bridges(machine, described),
        gpus=tuple(_linked(gpu, above.get(gpu.bdf)) for gpu in gpus),
        nics=tuple(_moved(nic, above.get(nic.bdf), cpus) for nic in machine.nics),
        drives=tuple(_moved(drive, above.get(drive.bdf), cpus) for drive in machine.drives),
        notes=(*machine.notes, note),
    )


def _moved(
    device: AnyDevice, described: Device | None, cpus: Mapping[int, tuple[int, ...]]
) -> AnyDevice:
    """Return a device where it is described to be."""
    if described is None or described.parent is None:
        return device
    node = device.numa_node if described.numa_node is None else described.numa_node
    return replace(
        device,
        parent=described.parent,
        numa_node=node,
        cpus=device.cpus if node is None else cpus.get(node, described.cpus),
        link_mbps=described.link_mbps if device.link_mbps is None else device.link_mbps,
    )


def _linked(gpu: Gpu, described: Device | None) -> Gpu:
    """Return a GPU with the NVLinks it is described to have, if nobody else said."""
    if gpu.nvlinks or not isinstance(described, Gpu):
        return gpu
    return replace(gpu, nvlinks=described.nvlinks)


def _bridges(machine: Machine, described: Machine) -> tuple[Bridge, ...]:
    found = {bridge.name: bridge for bridge in machine.bridges}
    found |= {bridge.name: bridge for bridge in described.bridges}
    return tuple(bridge for _, bridge in sorted(found.items()))


def _nodes(machine: Machine, described: Machine) -> tuple[NumaNode, ...]:
    """Return the machine's nodes; the file's where the kernel shows fewer."""
    known = {node.index for node in machine.nodes}
    more = [node for node in described.nodes if node.index not in known]
    return tuple(sorted((*machine.nodes, *more), key=lambda node: node.index))
