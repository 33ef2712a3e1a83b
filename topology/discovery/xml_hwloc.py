"""hwloc's XML, as ``lstopo`` writes it: versions 2 and 3, parsed without hwloc's tools."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Any, NamedTuple
from xml.etree import ElementTree

from tensorspill.errors import UnsupportedError
from tensorspill.topology.bdf import as_bdf, is_bdf
from tensorspill.topology.discovery.sysfs import natural
from tensorspill.topology.discovery.xml_files import cpus_of_mask, naming, parse_xml, whole_number
from tensorspill.topology.machine import Bridge, Drive, Gpu, Machine, Nic, NumaNode

__all__ = ["read_hwloc_xml"]

_BELOW = {"host": "root-port", "root-port": "switch", "switch": "port", "port": "switch"}


class _Where(NamedTuple):
    """What is above an element: socket, host bridge or port, NUMA node, CPUs."""

    socket: int | None
    bridge: str
    kind: str
    node: int | None
    cpus: tuple[int, ...]


def read_hwloc_xml(path: str | os.PathLike[str]) -> Machine:
    """Return the machine that an XML file of hwloc's describes.

    It needs the I/O objects (``lstopo --whole-io``) for anything but CPUs.

    Raises
    ------
    BrokenError
        The file can't be read.
    UnsupportedError
        It is no XML, is cut short, or is no topology of hwloc's; the error names the file.
    """
    name = os.fspath(path)
    topology = parse_xml(name, "topology")
    reader = _Reader(name)
    with naming(name):
        for element in topology.findall("object"):
            reader.read(element, _Where(None, "", "", None, ()))
        return reader.machine()


class _Reader:
    """Walks the tree of objects."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._why = f"{path} does not say"
        self._hostname = ""
        self._nodes: dict[int, NumaNode] = {}
        self._bridges: dict[str, Bridge] = {}
        self._gpus: dict[str, Gpu] = {}
        self._nics: dict[str, Nic] = {}
        self._drives: dict[str, Drive] = {}

    def machine(self) -> Machine:
        """Return the machine, its GPUs numbered by PCI address."""
        gpus = sorted(self._gpus.items())
        return Machine(
            hostname=self._hostname,
            source=f"hwloc's file {self._path}",
            nodes=tuple(node for _, node in sorted(self._nodes.items())),
            bridges=tuple(bridge for _, bridge in sorted(self._bridges.items())),
            gpus=tuple(replace(gpu, index=i) for i, (_, gpu) in enumerate(gpus)),
            nics=tuple(self._nics[name] for name in sorted(self._nics, key=natural)),
            drives=tuple(self._drives[name] for name in sorted(self._drives, key=natural)),
        )

    def read(self, element: ElementTree.Element, where: _Where) -> None:
        """Read an object and those below it, in the order that a node comes before its devices."""
        children = element.findall("object")
        kind = element.get("type") or ""
        if kind == "Machine":
            self._hostname = _infos(element).get("HostName", "")
        where = self._inside(element, kind, children, where)
        if kind == "Bridge":
            where = self._bridge(element, where)
        elif kind == "PCIDev":
            self._device(element, children, where)
            return
        for child in children:
            self.read(child, where)

    def _inside(
        self,
        element: ElementTree.Element,
        kind: str,
        children: list[ElementTree.Element],
        where: _Where,
    ) -> _Where:
        """Return where the children of a package, group or cache are."""
        if kind == "Package":
            where = where._replace(socket=whole_number(element.get("os_index")))
        nodes = [child for child in children if child.get("type") == "NUMANode"]
        for node in nodes:
            self._node(node, where)
        # A device is next to a node if only one with CPUs is beside its bridge.
        own = [self._nodes[i] for n in nodes if (i := whole_number(n.get("os_index"))) is not None]
        local = [node for node in own if not node.memory_only]
        if len(local) == 1:
            where = where._replace(node=local[0].index, cpus=local[0].cpus)
        elif local:
            where = where._replace(node=None, cpus=cpus_of_mask(element.get("cpuset") or ""))
        return where

    def _node(self, element: ElementTree.Element, where: _Where) -> None:
        index = whole_number(element.get("os_index"))
        if index is None:
            raise UnsupportedError("A NUMANode without os_index", path=self._path)
        cpus = cpus_of_mask(element.get("cpuset") or "")
        self._nodes[index] = NumaNode(
            index=index,
            cpus=cpus,
            socket=where.socket if cpus else None,
            memory_bytes=whole_number(element.get("local_memory")),
            unknown=(
                ("socket", self._why if cpus else "it has no CPUs"),
                ("memory_bytes", self._why),
            ),
        )

    def _bridge(self, element: ElementTree.Element, where: _Where) -> _Where:
        if (element.get("bridge_type") or "").startswith("0-"):
            pci = element.get("bridge_pci") or ""
            match = re.match(r"([0-9a-f]{1,8}):\[([0-9a-f]{1,2})-", pci)
            if match is None:
                raise UnsupportedError(f"A Bridge at {pci!r}", path=self._path)
            name, kind = f"pci{int(match[1], 16):04x}:{int(match[2], 16):02x}", "host"
        else:
            name, kind = self._address(element), _BELOW.get(where.kind, "bridge")
        rate = None if kind == "host" else _link(element)
        self._bridges[name] = Bridge(
            name=name,
            parent="" if kind == "host" else where.bridge,
            kind=kind,
            numa_node=where.node,
            link_mbps=rate,
            unknown=(("numa_node", self._why), ("link_mbps", self._why)),
        )
        return where._replace(bridge=name, kind=kind)

    def _device(
        self, element: ElementTree.Element, children: list[ElementTree.Element], where: _Where
    ) -> None:
        """Read a PCI device by what the operating system has on it."""
        bdf = self._address(element)
        place: dict[str, Any] = {
            "bdf": bdf,
            "parent": where.bridge or None,
            "numa_node": where.node,
            "cpus": where.cpus,
            "link_mbps": _link(element),
            "unknown": (("numa_node", self._why), ("link_mbps", self._why)),
        }
        vendor = (element.get("pci_type") or "").partition("[")[2][:4]
        kind = (element.get("pci_type") or "")[:4]
        if kind in ("0300", "0302") and vendor in ("10de", "1002"):
            uuid = next((u for c in children if (u := _infos(c).get("NVIDIAUUID"))), None)
            self._gpus[bdf] = Gpu(uuid=uuid, name=_infos(element).get("PCIDevice", ""), **place)
            return
        names = {child.get("name") or "": child for child in children}
        interfaces = tuple(sorted(n for n, c in names.items() if _is(c, "2", "Network")))
        rdma = [name for name, child in names.items() if _is(child, "3", "OpenFabrics")]
        for name in rdma or interfaces:
            self._nics[name] = Nic(
                name=name, kind=_nic_kind(name, kind, bool(rdma)), interfaces=interfaces, **place
            )  # fmt: skip
        for name, child in names.items():
            if _is(child, "0", "Storage") and name:
                self._drives[name] = _drive(name, child, place)

    def _address(self, element: ElementTree.Element) -> str:
        text = element.get("pci_busid") or ""
        if not is_bdf(text):
            raise UnsupportedError(f"No PCI address, but {text!r}, in an object", path=self._path)
        return as_bdf(text)


def _drive(name: str, element: ElementTree.Element, place: dict[str, Any]) -> Drive:
    infos = _infos(element)
    kib = whole_number(infos.get("Size"))
    return Drive(
        name=name,
        kind="nvme" if name.startswith("nvme") else "scsi" if name.startswith("sd") else "other",
        model=infos.get("Model", ""),
        capacity=None if kib is None else kib << 10,
        **place,
    )


def _is(element: ElementTree.Element, number: str, word: str) -> bool:
    """Return whether an OSDev is of a type: a number in version 2, a set of bits or words in 3."""
    kind = element.get("osdev_type") or ""
    if element.get("type") != "OSDev":
        return False
    if kind.startswith("0x") and re.fullmatch("0x[0-9a-f]{1,8}", kind):
        return bool(int(kind, 16) >> _BITS[word] & 1)
    return kind == number or word in kind


#: Version 3: storage, memory, GPU, coprocessor, network, OpenFabrics, DMA.
_BITS = {"Storage": 0, "Network": 4, "OpenFabrics": 5}


def _nic_kind(name: str, kind: str, rdma: bool) -> str:
    if not rdma:
        return "ethernet"
    if kind == "0207":
        return "infiniband"
    if name.startswith(("efa", "rdmap")):
        return "efa"
    return "roce" if name.startswith("mlx") else "rdma"


def _infos(element: ElementTree.Element) -> dict[str, str]:
    return {info.get("name") or "": info.get("value") or "" for info in element.findall("info")}


def _link(element: ElementTree.Element) -> int | None:
    """Return the rate of a link in MB/s; hwloc has GB/s, and 0 for unknown."""
    speed = element.get("pci_link_speed") or ""
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,9})?", speed):
        return None
    return int(float(speed) * 1000) or None
