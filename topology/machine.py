"""One node of a cluster as frozen data: processors, PCIe, GPUs, NICs, drives, mounts.

Sizes are in bytes, rates in MB/s (10^6 bytes a second, which is bytes a microsecond) unless a name
says otherwise, and PCI addresses are spelled as `tensorspill.topology.bdf.as_bdf` does. A field
that is None is unknown, and ``record.why("field")`` says why.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeAlias

from tensorspill.errors import UnsupportedError
from tensorspill.topology.bdf import as_bdf, is_bdf
from tensorspill.topology.record import Record

__all__ = [
    "Bridge",
    "Device",
    "Drive",
    "Gpu",
    "Machine",
    "Mig",
    "Mount",
    "Nic",
    "NumaNode",
    "NvLink",
    "Socket",
    "Stack",
]


@dataclass(frozen=True, kw_only=True)
class NumaNode(Record):
    """A NUMA node.

    Attributes
    ----------
    index : int
        The kernel's number.
    cpus : tuple of int
        Its CPUs; none if it has only memory, as the GPUs of a GB200 do.
    socket : int or None
        The processor package of its CPUs.
    memory_bytes : int or None
        Size of its memory.
    distances : tuple of int
        The firmware's distance to each node, in the order of `Machine.nodes`; 10 is itself.
    """

    index: int
    cpus: tuple[int, ...] = ()
    socket: int | None = None
    memory_bytes: int | None = None
    distances: tuple[int, ...] = ()

    @property
    def memory_only(self) -> bool:
        """Whether no CPU belongs to it."""
        return not self.cpus


@dataclass(frozen=True, kw_only=True)
class Socket(Record):
    """A processor package, derived from the NUMA nodes."""

    index: int
    nodes: tuple[int, ...] = ()
    cpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Bridge(Record):
    """A vertex of the PCIe tree that is no end device.

    Attributes
    ----------
    name : str
        A PCI address, or ``pci0000:00`` for a host bridge (a root of the tree).
    parent : str
        Name of the bridge above; empty for a host bridge.
    kind : str
        ``"host"``, ``"root-port"``, ``"switch"`` (a switch's upstream port, which stands for the
        switch), ``"port"`` (a switch's downstream port) or ``"bridge"`` (any other).
    numa_node : int or None
        Index of its NUMA node.
    link_mbps : int or None
        What its link upward carries in one direction.
    """

    name: str
    parent: str = ""
    kind: str = "bridge"
    numa_node: int | None = None
    link_mbps: int | None = None


@dataclass(frozen=True, kw_only=True)
class NvLink(Record):
    """Bonded NVLinks from a GPU: `peer` is a GPU's PCI address, or ``"nvswitch"``."""

    peer: str
    count: int


@dataclass(frozen=True, kw_only=True)
class Mig(Record):
    """A slice of a GPU in MIG mode: its index on that GPU, ``MIG-…`` UUID and size."""

    index: int
    uuid: str | None = None
    memory_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gpu(Record):
    """A GPU.

    Attributes
    ----------
    index : int or None
        NVML's number, which is by PCI address; not CUDA's.
    bdf : str or None
        PCI address.
    uuid : str or None
        ``GPU-…``.
    name : str
        Product name; may be empty.
    parent : str or None
        Name of the bridge directly above it.
    numa_node : int or None
        The node with CPUs that is next to it.
    memory_node : int or None
        The memory-only node that its own memory is.
    cpus : tuple of int
        CPUs next to it, as the kernel or the driver says.
    memory_bytes, link_mbps : int or None
        Size of its memory; what its PCIe link carries in one direction.
    nvlinks : tuple of NvLink
        By peer.
    migs : tuple of Mig
        Slices, in MIG mode.
    """

    index: int | None = None
    bdf: str | None = None
    uuid: str | None = None
    name: str = ""
    parent: str | None = None
    numa_node: int | None = None
    memory_node: int | None = None
    cpus: tuple[int, ...] = ()
    memory_bytes: int | None = None
    link_mbps: int | None = None
    nvlinks: tuple[NvLink, ...] = ()
    migs: tuple[Mig, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Nic(Record):
    """A network port with a device of its own.

    Attributes
    ----------
    name : str
        ``mlx5_0``, or the interface for plain Ethernet: ``eth0``.
    kind : str
        ``"infiniband"``, ``"roce"``, ``"efa"``, ``"rdma"`` (which of these isn't known) or
        ``"ethernet"``.
    interfaces : tuple of str
        Network interfaces on the same device.
    up : bool or None
        Whether the link is up.
    mbps : int or None
        Rate of the network link, in MB/s of one direction.
    """

    name: str
    kind: str = "ethernet"
    bdf: str | None = None
    parent: str | None = None
    numa_node: int | None = None
    cpus: tuple[int, ...] = ()
    interfaces: tuple[str, ...] = ()
    up: bool | None = None
    mbps: int | None = None
    link_mbps: int | None = None


@dataclass(frozen=True, kw_only=True)
class Drive(Record):
    """A whole disk: an NVMe namespace, or another block device that no other is made of.

    Attributes
    ----------
    name : str
        Block device: ``nvme0n1``.
    kind : str
        ``"nvme"``, ``"virtio"``, ``"scsi"`` or ``"other"``.
    transport : str
        Of NVMe: ``"pcie"``, ``"tcp"``, …; may be empty.
    controller : str
        Of NVMe: ``nvme0``; may be empty.
    more_bdfs : tuple of str
        Further controllers' PCI addresses, with multipath.
    capacity : int or None
        Bytes.
    write_mbps, read_mbps : int or None
        Measured or given rates; link_mbps bounds both.
    synthetic : bool
        Whether its place and rates are made up, since no source gives them.
    """

    name: str
    kind: str = "nvme"
    model: str = ""
    transport: str = ""
    controller: str = ""
    bdf: str | None = None
    more_bdfs: tuple[str, ...] = ()
    parent: str | None = None
    numa_node: int | None = None
    cpus: tuple[int, ...] = ()
    capacity: int | None = None
    write_mbps: int | None = None
    read_mbps: int | None = None
    link_mbps: int | None = None
    synthetic: bool = False


@dataclass(frozen=True, kw_only=True)
class Stack(Record):
    """A block device made of others: md, device mapper (LVM, crypt), bcache.

    `members` are names of drives or of stacks below; `drives` are the drives at the bottom.
    """

    name: str
    kind: str = ""
    label: str = ""
    members: tuple[str, ...] = ()
    drives: tuple[str, ...] = ()
    capacity: int | None = None


@dataclass(frozen=True, kw_only=True)
class Mount(Record):
    """A mounted file system that can hold files of the user's.

    `device` is the drive or stack (not the partition) below it, None if there is none on this
    machine or it can't be told; `shared` says that it is reached over a network.
    """

    path: str
    filesystem: str = ""
    source: str = ""
    device: str | None = None
    shared: bool = False


Device: TypeAlias = Gpu | Nic | Drive


@dataclass(frozen=True, kw_only=True)
class Machine(Record):
    """One node of a cluster.

    Attributes
    ----------
    hostname, source : str
        Its name; where the facts come from, such as ``"sysfs"``.
    nodes, bridges, gpus, nics, drives, stacks, mounts
        What it consists of.
    notes : tuple of str
        What could not be read, and why; what is made up.

    Raises
    ------
    UnsupportedError
        Two records of a kind have the same name.
    """

    hostname: str = ""
    source: str = ""
    nodes: tuple[NumaNode, ...] = ()
    bridges: tuple[Bridge, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nics: tuple[Nic, ...] = ()
    drives: tuple[Drive, ...] = ()
    stacks: tuple[Stack, ...] = ()
    mounts: tuple[Mount, ...] = ()
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _unique("NUMA node", (node.index for node in self.nodes))
        _unique("bridge", (bridge.name for bridge in self.bridges))
        _unique("GPU", (gpu.bdf for gpu in self.gpus if gpu.bdf))
        _unique("NIC", (nic.name for nic in self.nics))
        _unique("block device", [d.name for d in self.drives] + [s.name for s in self.stacks])

    @property
    def devices(self) -> tuple[Device, ...]:
        """The GPUs, NICs and drives, in this order."""
        return (*self.gpus, *self.nics, *self.drives)

    @functools.cached_property
    def sockets(self) -> tuple[Socket, ...]:
        """The processor packages, by number; those of unknown nodes are left out."""
        known = sorted({n.socket for n in self.nodes if n.socket is not None and n.cpus})
        found = []
        for index in known:
            nodes = [node for node in self.nodes if node.socket == index]
            cpus = tuple(sorted(cpu for node in nodes for cpu in node.cpus))
            found.append(Socket(index=index, nodes=tuple(n.index for n in nodes), cpus=cpus))
        return tuple(found)

    def node(self, index: int | None) -> NumaNode | None:
        """Return a NUMA node by its index, or None."""
        return next((node for node in self.nodes if node.index == index), None)

    def socket_of(self, device: Device) -> int | None:
        """Return the socket that a device is next to, or None if unknown."""
        node = self.node(device.numa_node)
        return None if node is None or node.memory_only else node.socket

    @functools.cached_property
    def _bridges(self) -> dict[str, Bridge]:
        return {bridge.name: bridge for bridge in self.bridges}

    def ancestors(self, device: Device | Bridge) -> tuple[Bridge, ...]:
        """Return the bridges above a device, from the nearest to the host bridge."""
        found: dict[str, Bridge] = {}
        name = device.parent
        while name and name in self._bridges and name not in found:
            found[name] = self._bridges[name]
            name = found[name].parent
        return tuple(found.values())

    def switch_of(self, device: Device) -> str | None:
        """Return the name of the PCIe switch nearest to a device, or None if there is none."""
        return next((b.name for b in self.ancestors(device) if b.kind == "switch"), None)

    def gpu(self, key: int | str) -> Gpu:
        """Return a GPU by index, PCI address, UUID or UUID prefix.

        Raises
        ------
        UnsupportedError
            There is none, or a prefix fits several.
        """
        found = [gpu for gpu in self.gpus if _fits(gpu, key)]
        if len(found) != 1:
            why = "no GPU is" if not found else f"{len(found)} GPUs are"
            raise UnsupportedError(f"{self.hostname or 'this machine'}: {why} {key!r}")
        return found[0]

    def nic(self, name: str) -> Nic:
        """Return a NIC by name or interface, or raise `UnsupportedError`."""
        for nic in self.nics:
            if name == nic.name or name in nic.interfaces:
                return nic
        raise UnsupportedError(f"{self.hostname or 'this machine'}: no NIC is {name!r}")

    def drive(self, name: str) -> Drive:
        """Return a drive by the name of its block device, or raise `UnsupportedError`."""
        for drive in self.drives:
            if name == drive.name:
                return drive
        raise UnsupportedError(f"{self.hostname or 'this machine'}: no drive is {name!r}")


def _fits(gpu: Gpu, key: int | str) -> bool:
    if isinstance(key, int):
        return gpu.index == key
    if is_bdf(key):
        return gpu.bdf == as_bdf(key)
    return len(key) > len("GPU-") and (gpu.uuid or "").lower().startswith(key.lower())


def _unique(what: str, names: Iterable[int | str]) -> None:
    seen: set[int | str] = set()
    for name in names:
        if name in seen:
            raise UnsupportedError(f"Two records of one {what}: {name}")
        seen.add(name)
