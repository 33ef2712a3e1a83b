"""Building a machine from the few facts that are known of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from tensorspill.errors import UnsupportedError
from tensorspill.topology.bdf import as_bdf
from tensorspill.topology.discovery.sysfs import cpu_list, link_mbps, natural
from tensorspill.topology.machine import (
    Bridge,
    Drive,
    Gpu,
    Machine,
    Mount,
    Nic,
    NumaNode,
    NvLink,
    Stack,
)

__all__ = ["GIB", "Builder", "link"]

GIB = 1 << 30
_NOT_MEASURED = "not measured"


def link(generation: int, lanes: int = 16) -> int:
    """Return what a PCIe link of a generation carries in one direction, in MB/s."""
    speed = {3: "8", 4: "16", 5: "32"}[generation]
    rate = link_mbps(f"{speed}.0 GT/s PCIe", str(lanes))
    assert rate is not None
    return rate


class Builder:
    """Collects the parts of one machine.

    Parameters
    ----------
    name : str
        The fixture's name, which is the hostname as well.
    link : int or None
        Rate of the links of GPUs and switches, in MB/s.
    ports : bool
        Give switches the root ports and downstream ports that sysfs shows. A description such as
        NCCL's has only the switches.
    """

    def __init__(self, name: str, link: int | None, *, ports: bool = True) -> None:
        self._name = name
        self._link = link
        self._ports = ports
        self._why = "the machine's description does not say"
        self._nodes: dict[int, NumaNode] = {}
        self._bridges: dict[str, Bridge] = {}
        self._addresses: dict[str, int] = {}
        self._gpus: list[Gpu] = []
        self._nics: list[Nic] = []
        self._drives: list[Drive] = []
        self._stacks: list[Stack] = []
        self._mounts: list[Mount] = []
        self._notes: list[str] = []

    def note(self, text: str) -> None:
        """Say what is made up."""
        self._notes.append(text)

    def node(self, index: int, cpus: str, socket: int | None, gib: int | None = None) -> None:
        """Add a NUMA node; without CPUs it has only memory."""
        self._nodes[index] = NumaNode(
            index=index,
            cpus=cpu_list(cpus) or (),
            socket=socket,
            memory_bytes=None if gib is None else gib * GIB,
            unknown=(("memory_bytes", self._why), ("socket", "it has no CPUs")),
        )

    def host(self, name: str, node: int | None) -> str:
        """Add a host bridge, such as ``pci0000:00``."""
        if name in self._bridges:
            raise UnsupportedError(f"{self._name}: two host bridges {name}")
        why = (("link_mbps", "a host bridge has no link"), ("numa_node", self._why))
        self._bridges[name] = Bridge(name=name, kind="host", numa_node=node, unknown=why)
        return name

    def switch(self, above: str, bdf: str | None = None) -> str:
        """Add a switch below a host bridge or another switch, and return its name."""
        return self._bridge(self._port(above, "root-port"), "switch", bdf)

    def gpu(self, above: str, bdf: str, name: str = "", **fields: Any) -> str:
        """Add a GPU, and return its PCI address."""
        place = self._place(above, bdf) | {"link_mbps": self._link} | fields
        index = len(self._gpus)
        self._gpus.append(Gpu(index=index, name=name, unknown=self._unknown(place), **place))
        return str(place["bdf"])

    def nic(self, above: str, bdf: str, name: str, kind: str, gbit: int, **fields: Any) -> None:
        """Add a NIC whose network link carries `gbit` Gbit/s."""
        place = self._place(above, bdf) | {"link_mbps": self._link} | fields
        rate = gbit * 125
        self._nics.append(
            Nic(name=name, kind=kind, mbps=rate, up=True, unknown=self._unknown(place), **place)
        )

    def drive(
        self, above: str | None, bdf: str, gigabytes: int, generation: int, **fields: Any
    ) -> str:
        """Add an NVMe drive of made-up place and rates, and return the name of its block device."""
        index = len(self._drives)
        # What drives of these generations write and read, in round figures.
        write, read = {3: (2000, 3200), 4: (4000, 6800), 5: (6000, 12000)}[generation]
        place: dict[str, Any] = {"bdf": as_bdf(bdf)} if above is None else self._place(above, bdf)
        place |= {
            "capacity": gigabytes * 10**9 >> 9 << 9,
            "write_mbps": write,
            "read_mbps": read,
            "link_mbps": link(generation, 4),
        } | fields
        node = self._nodes.get(place.get("numa_node", -1))
        place.setdefault("cpus", node.cpus if node else ())
        drive = Drive(
            name=f"nvme{index}n1",
            controller=f"nvme{index}",
            transport="pcie",
            synthetic=True,
            unknown=self._unknown(place),
            **place,
        )
        self._drives.append(drive)
        return drive.name

    def raid(self, path: str) -> None:
        """Stripe all drives into one array, mounted at a path; both are made up."""
        names = tuple(drive.name for drive in self._drives)
        capacity = sum(drive.capacity or 0 for drive in self._drives)
        self._stacks.append(
            Stack(name="md0", kind="raid0", members=names, drives=names,
                  capacity=capacity)
        )  # fmt: skip
        self._mounts.append(Mount(path=path, filesystem="xfs", source="/dev/md0", device="md0"))

    def build(self, nvlinks: Iterable[tuple[str, int]] = ()) -> Machine:
        """Return the machine.

        Parameters
        ----------
        nvlinks : iterable of pairs
            For each GPU, the peer and count of its links; the peer ``"each"`` is every other GPU.
        """
        pairs = list(nvlinks)
        gpus = [_linked(gpu, pairs, self._gpus) for gpu in self._gpus]
        made_up = ["Place and rates of the NVMe drives, the array and its mount are made up"]
        return Machine(
            hostname=self._name,
            source=f"facts about {self._name}",
            nodes=tuple(node for _, node in sorted(self._nodes.items())),
            bridges=tuple(bridge for _, bridge in sorted(self._bridges.items())),
            gpus=tuple(gpus),
            nics=tuple(sorted(self._nics, key=lambda nic: natural(nic.name))),
            drives=tuple(self._drives),
            stacks=tuple(self._stacks),
            mounts=tuple(self._mounts),
            notes=(*(made_up if self._drives else []), *self._notes),
        )

    def _unknown(self, place: dict[str, Any]) -> tuple[tuple[str, str], ...]:
        fields = ("uuid", "parent", "numa_node", "memory_node", "memory_bytes", "link_mbps", "up")
        return tuple((name, self._why) for name in fields if place.get(name) is None)

    def _place(self, above: str, bdf: str) -> dict[str, Any]:
        """Return the fields of a device's place; below a switch it has a port of its own."""
        parent = self._port(above, "")
        node = self._bridges[parent].numa_node
        known = None if node is None else self._nodes.get(node)
        return {
            "bdf": as_bdf(bdf),
            "parent": parent,
            "numa_node": node,
            "cpus": known.cpus if known else (),
        }

    def _port(self, above: str, below_host: str) -> str:
        """Return a new port of a switch; of a host bridge if it should have one."""
        kind = "port" if self._bridges[above].kind == "switch" else below_host
        return self._bridge(above, kind, None) if kind and self._ports else above

    def _bridge(self, above: str, kind: str, bdf: str | None) -> str:
        parent = self._bridges[above]
        name = as_bdf(bdf) if bdf else self._made_up(above)
        self._bridges[name] = Bridge(
            name=name,
            parent=above,
            kind=kind,
            numa_node=parent.numa_node,
            link_mbps=self._link,
            unknown=(("numa_node", self._why), ("link_mbps", self._why)),
        )
        return name

    def _made_up(self, above: str) -> str:
        """Return an address that no device has: all bridges are on their host bridge's bus."""
        while self._bridges[above].parent:
            above = self._bridges[above].parent
        number = self._addresses[above] = self._addresses.get(above, 0) + 1
        return f"{above.removeprefix('pci')}:{number >> 3:02x}.{number & 7}"


def _linked(gpu: Gpu, pairs: list[tuple[str, int]], gpus: list[Gpu]) -> Gpu:
    """Return a GPU with its NVLinks."""
    found: list[NvLink] = []
    for peer, count in pairs:
        others = [other.bdf or "" for other in gpus if other is not gpu]
        names = others if peer == "each" else [peer]
        found.extend(NvLink(peer=name, count=count) for name in names)
    return replace(gpu, nvlinks=tuple(sorted(found, key=lambda item: item.peer)))
