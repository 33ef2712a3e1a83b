"""How far two devices of a machine are from each other, in the classes of ``nvidia-smi topo``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from tensorspill.topology.machine import Bridge, Device, Gpu, Machine
from tensorspill.topology.record import Record

__all__ = ["CLASSES", "Distance", "distance", "distance_from_cpus", "nearest"]

#: From near to far; "?" is unknown.
CLASSES = ("X", "NV", "PIX", "PXB", "PHB", "NODE", "SYS", "?")

AnyDevice = TypeVar("AnyDevice", bound=Device)


@dataclass(frozen=True, kw_only=True)
class Distance(Record):
    """A distance.

    Attributes
    ----------
    kind : str
        ``"X"`` the same device, ``"NV"`` NVLink, ``"PIX"`` at most one PCIe switch, ``"PXB"``
        several switches but no host bridge, ``"PHB"`` one host bridge, ``"NODE"`` between host
        bridges of one NUMA node, ``"SYS"`` between NUMA nodes, ``"?"`` unknown.
    nvlinks : int
        Bonded NVLinks.
    reason : str
        Why it is unknown; else empty.
    """

    kind: str
    nvlinks: int = 0
    reason: str = ""

    @property
    def label(self) -> str:
        """As ``nvidia-smi`` prints it: ``NV18``, ``PIX``."""
        return f"NV{self.nvlinks}" if self.kind == "NV" else self.kind

    @property
    def rank(self) -> int:
        """Its place from near to far."""
        return CLASSES.index(self.kind)


def distance(machine: Machine, a: Device, b: Device) -> Distance:
    """Return how far two devices are from each other."""
    if a is b or a == b:
        return Distance(kind="X")
    if isinstance(a, Gpu) and isinstance(b, Gpu) and (links := _nvlinks(a, b)):
        return Distance(kind="NV", nvlinks=links)
    above_a, above_b = machine.ancestors(a), machine.ancestors(b)
    names = {bridge.name for bridge in above_b}
    common = next((bridge for bridge in above_a if bridge.name in names), None)
    if common is None:
        return _between_hosts(machine, a, b)
    if common.kind == "host":
        return Distance(kind="PHB")
    crossed = _below(above_a, common) | _below(above_b, common)
    return Distance(kind="PIX" if len(crossed) <= 1 else "PXB")


def nearest(
    machine: Machine, device: Device | int | None, others: Sequence[AnyDevice]
) -> tuple[Distance, tuple[AnyDevice, ...]]:
    """Return the least distance to any of several devices, and all that are so near.

    Parameters
    ----------
    machine : Machine
        Where all are.
    device : device, int or None
        From where; a NUMA node's index stands for its CPUs, None for CPUs of an unknown node.
    others : sequence of devices
        Those at an unknown distance count only if all are.
    """
    if device is None or isinstance(device, int):
        pairs = [(distance_from_cpus(machine, device, other), other) for other in others]
    else:
        pairs = [(distance(machine, device, other), other) for other in others]
    if not pairs:
        return Distance(kind="?", reason="there is none"), ()
    least = min((pair[0] for pair in pairs), key=lambda item: item.rank)
    return least, tuple(other for item, other in pairs if item.rank == least.rank)


def _nvlinks(a: Gpu, b: Gpu) -> int:
    """Return the links between two GPUs, direct or through NVSwitch."""
    to_b = {link.peer: link.count for link in a.nvlinks}
    to_a = {link.peer: link.count for link in b.nvlinks}
    if a.bdf is not None and b.bdf in to_b:
        return to_b[b.bdf]
    return min(to_b.get("nvswitch", 0), to_a.get("nvswitch", 0))


def _below(above: tuple[Bridge, ...], common: Bridge) -> set[str]:
    """Return the switches on the way up to a bridge, which counts as well."""
    found: set[str] = set()
    for bridge in above:
        if bridge.kind in ("switch", "bridge"):
            found.add(bridge.name)
        if bridge.name == common.name:
            break
    return found


def distance_from_cpus(machine: Machine, node: int | None, device: Device) -> Distance:
    """Return how far a device is from the CPUs of a NUMA node; None is an unknown node."""
    if _one_node(machine) and device.bdf is not None:
        return Distance(kind="NODE")
    if node is None:
        return Distance(kind="?", reason="the NUMA node of the CPUs is unknown")
    if device.numa_node is None:
        return Distance(kind="?", reason=f"NUMA node: {device.why('numa_node')}")
    return Distance(kind="NODE" if device.numa_node == node else "SYS")


def _between_hosts(machine: Machine, a: Device, b: Device) -> Distance:
    if a.numa_node is not None and b.numa_node is not None:
        return Distance(kind="NODE" if a.numa_node == b.numa_node else "SYS")
    # A device without a PCI address may be one over a network.
    if _one_node(machine) and a.bdf is not None and b.bdf is not None:
        return Distance(kind="NODE")
    lost = a if a.numa_node is None else b
    what = lost.bdf or lost.name or "a device"
    return Distance(kind="?", reason=f"NUMA node of {what}: {lost.why('numa_node')}")


def _one_node(machine: Machine) -> bool:
    return sum(not node.memory_only for node in machine.nodes) == 1
