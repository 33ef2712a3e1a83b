"""A machine as nested branches, from sockets down to devices, for pictures and terminals."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from tensorspill.topology.machine import Bridge, Device, Gpu, Machine, Nic, NumaNode

__all__ = ["Branch", "numbers", "outline", "rate", "size"]

#: Ports only lengthen the way; they aren't shown.
_SHOWN = ("host", "switch", "bridge")
_UNKNOWN = -1


@dataclass(frozen=True)
class Branch:
    """A part of a machine and what is below it.

    Attributes
    ----------
    kind : str
        ``"socket"``, ``"node"``, ``"memory"``, ``"unknown"``, ``"host"``, ``"switch"``,
        ``"bridge"``, ``"gpu"``, ``"nic"`` or ``"drive"``.
    title : str
        What it is called.
    details : tuple of str
        What more there is to say, the most important first.
    device : device or None
        The end device that it stands for.
    """

    kind: str
    title: str
    details: tuple[str, ...] = ()
    children: tuple[Branch, ...] = ()
    device: Device | None = None

    @property
    def leaves(self) -> int:
        """How many devices are below it; at least 1."""
        return max(1, sum(child.leaves for child in self.children))


def outline(machine: Machine) -> tuple[Branch, ...]:
    """Return the sockets of a machine with what is below them, and what has no known place."""
    below = _below(machine)
    found = []
    with_cpus = [node for node in machine.nodes if not node.memory_only]
    if len(with_cpus) == 1:
        # What has no known node can be nowhere else.
        below.setdefault(with_cpus[0].index, []).extend(below.pop(_UNKNOWN, []))
    by_socket = sorted(with_cpus, key=lambda node: -1 if node.socket is None else node.socket)
    for socket, group in groupby(by_socket, key=lambda node: node.socket):
        nodes = tuple(_node(node, below) for node in group)
        title = "socket unknown" if socket is None else f"socket {socket}"
        found.append(
            _merged(title, nodes[0]) if len(nodes) == 1 else Branch("socket", title, (), nodes)
        )
    memory = [node.index for node in machine.nodes if node.memory_only]
    if memory:
        found.append(Branch("memory", "memory without CPUs", (f"NUMA {numbers(memory)}",)))
    known = {node.index for node in with_cpus}
    lost = [b for index, branches in sorted(below.items()) if index not in known for b in branches]
    if lost:
        found.append(Branch("unknown", "NUMA node unknown", (), tuple(lost)))
    return tuple(found)


def _merged(title: str, node: Branch) -> Branch:
    return Branch("socket", title, (node.title, *node.details), node.children)


def _node(node: NumaNode, below: dict[int, list[Branch]]) -> Branch:
    words = [f"CPUs {numbers(node.cpus)}"]
    if node.memory_bytes:
        words.append(size(node.memory_bytes, 1024))
    return Branch("node", f"NUMA {node.index}", tuple(words), tuple(below.get(node.index, ())))


def _below(machine: Machine) -> dict[int, list[Branch]]:
    """Return what hangs from each NUMA node."""
    held: dict[str, list[Device | Bridge]] = {}
    found: dict[int, list[Branch]] = {}
    for bridge in machine.bridges:
        above = _shown(machine, bridge)
        if above is not None and bridge.kind in _SHOWN:
            held.setdefault(above.name, []).append(bridge)
    for device in machine.devices:
        above = _shown(machine, device)
        if above is not None:
            held.setdefault(above.name, []).append(device)
    for bridge in machine.bridges:
        if bridge.kind in _SHOWN and _shown(machine, bridge) is None and bridge.name in held:
            node = _UNKNOWN if bridge.numa_node is None else bridge.numa_node
            found.setdefault(node, []).append(_branch(bridge, held))
    for device in machine.devices:
        if _shown(machine, device) is None:
            node = _UNKNOWN if device.numa_node is None else device.numa_node
            found.setdefault(node, []).append(_leaf(device))
    return found


def _shown(machine: Machine, item: Device | Bridge) -> Bridge | None:
    return next((b for b in machine.ancestors(item) if b.kind in _SHOWN), None)


def _branch(bridge: Bridge, held: dict[str, list[Device | Bridge]]) -> Branch:
    below = [
        _branch(item, held) if isinstance(item, Bridge) else _leaf(item)
        for item in held.get(bridge.name, [])
        if not isinstance(item, Bridge) or item.name in held
    ]
    title = {"host": "host bridge", "switch": "PCIe switch"}.get(bridge.kind, "PCIe bridge")
    named = () if bridge.name.startswith("cpu") else (bridge.name.removeprefix("pci"),)
    return Branch(bridge.kind, title, named, tuple(below))


def _leaf(device: Device) -> Branch:
    words = [device.bdf or ""]
    if isinstance(device, Gpu):
        title = "GPU" if device.index is None else f"GPU {device.index}"
        memory = size(device.memory_bytes, 1024) if device.memory_bytes else ""
        words += [rate(device.link_mbps), device.name, memory]
        return Branch("gpu", title, _some(words), (), device)
    if isinstance(device, Nic):
        speed = "" if device.mbps is None else f"{device.mbps * 8 / 1000:g} Gb/s"
        down = "down" if device.up is False else ""
        words += [down, device.kind, speed]
        return Branch("nic", device.name, _some(words), (), device)
    capacity = size(device.capacity, 1000) if device.capacity else ""
    words += ["made up" if device.synthetic else "", capacity, rate(device.link_mbps), device.model]
    return Branch("drive", device.name, _some(words), (), device)


def _some(words: list[str]) -> tuple[str, ...]:
    return tuple(word for word in words if word)


def rate(mbps: int | None) -> str:
    """Return a rate as text, such as ``31.5 GB/s``; empty if unknown."""
    return "" if mbps is None else f"{mbps / 1000:.1f} GB/s"


def size(nbytes: int, base: int) -> str:
    """Return a size as text, in units of 1024 or 1000."""
    value, units = float(nbytes), ("B", "KiB", "MiB", "GiB", "TiB") if base == 1024 else (
        "B", "kB", "MB", "GB", "TB")  # fmt: skip
    for unit in units[:-1]:
        if value < base:
            return f"{value:.4g} {unit}"
        value /= base
    return f"{value:.4g} {units[-1]}"


def numbers(values: tuple[int, ...] | list[int]) -> str:
    """Return whole numbers as ranges: ``0-55,112-167``."""
    parts, ordered = [], sorted(values)
    for _, group in groupby(enumerate(ordered), key=lambda pair: pair[1] - pair[0]):
        run = [value for _, value in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
