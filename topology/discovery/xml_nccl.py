"""NCCL's topology files: what ``NCCL_TOPO_FILE`` names and ``NCCL_TOPO_DUMP_FILE`` writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from xml.etree import ElementTree

from tensorspill.errors import UnsupportedError
from tensorspill.topology.bdf import as_bdf, is_bdf
from tensorspill.topology.discovery.sysfs import link_mbps
from tensorspill.topology.discovery.xml_files import cpus_of_mask, naming, parse_xml, whole_number
from tensorspill.topology.machine import Bridge, Gpu, Machine, Nic, NumaNode, NvLink

__all__ = ["read_nccl_xml"]

_GPU = ("0x0300", "0x0302")
_NIC = ("0x0200", "0x0207")


def read_nccl_xml(path: str | os.PathLike[str]) -> Machine:
    """Return the machine that a topology file of NCCL's describes; it has no drives in it.

    Each ``cpu`` is taken for one host bridge, since the file names none.

    Raises
    ------
    BrokenError
        The file can't be read.
    UnsupportedError
        It is no XML, is cut short, or is no topology of NCCL's; the error names the file.
    """
    name = os.fspath(path)
    system = parse_xml(name, "system")
    reader = _Reader(name)
    with naming(name):
        for cpu in system.findall("cpu"):
            reader.read_cpu(cpu)
        return reader.machine()


class _Reader:
    """Collects what the elements describe."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._nodes: list[NumaNode] = []
        self._bridges: list[Bridge] = []
        self._gpus: list[Gpu] = []
        self._nics: list[Nic] = []

    def machine(self) -> Machine:
        """Return the machine, its GPUs numbered by PCI address."""
        gpus = sorted(self._gpus, key=lambda gpu: gpu.bdf or "")
        return Machine(
            source=f"NCCL's file {self._path}",
            nodes=tuple(self._nodes),
            bridges=tuple(sorted(self._bridges, key=lambda bridge: bridge.name)),
            gpus=tuple(replace(gpu, index=index) for index, gpu in enumerate(gpus)),
            nics=tuple(self._nics),
        )

    def read_cpu(self, cpu: ElementTree.Element) -> None:
        """Read a NUMA node and what hangs from it."""
        node = whole_number(cpu.get("numaid"))
        cpus = cpus_of_mask(cpu.get("affinity") or "")
        why = f"{self._path} does not say"
        if node is not None:
            reasons = (("memory_bytes", why), ("socket", why))
            self._nodes.append(NumaNode(index=node, cpus=cpus, unknown=reasons))
        host = f"cpu{len(self._bridges) if node is None else node}"
        self._bridges.append(Bridge(name=host, kind="host", numa_node=node))
        for child in cpu.findall("pci"):
            self._read_pci(child, host, node, cpus)

    def _read_pci(
        self, pci: ElementTree.Element, parent: str, node: int | None, cpus: tuple[int, ...]
    ) -> None:
        bdf = self._address(pci)
        rate = link_mbps(pci.get("link_speed") or "", pci.get("link_width") or "")
        why = f"{self._path}: link {pci.get('link_speed')!r} x {pci.get('link_width')!r}"
        children, kind = pci.findall("pci"), (pci.get("class") or "")[:6]
        unknown = (("link_mbps", why), ("numa_node", f"{self._path} does not say"))
        if pci.find("gpu") is not None or kind in _GPU:
            gpu = Gpu(
                bdf=bdf, parent=parent, numa_node=node, cpus=cpus, link_mbps=rate,
                nvlinks=self._nvlinks(pci), unknown=unknown,
            )  # fmt: skip
            self._gpus.append(gpu)
        elif pci.find("nic") is not None or kind in _NIC:
            nets = list(_nets(pci)) or [ElementTree.Element("net", {"name": bdf})]
            for net in nets:
                place = Nic(
                    name=net.get("name") or bdf, kind=_nic_kind(net, kind), bdf=bdf, parent=parent,
                    numa_node=node, cpus=cpus, mbps=_rate(net), link_mbps=rate, unknown=unknown,
                )  # fmt: skip
                self._nics.append(place)
        elif children or kind == "0x0604":
            self._bridges.append(
                Bridge(name=bdf, parent=parent, kind="switch", numa_node=node, link_mbps=rate)
            )
            for child in children:
                self._read_pci(child, bdf, node, cpus)

    def _address(self, pci: ElementTree.Element) -> str:
        text = pci.get("busid") or ""
        if not is_bdf(text):
            raise UnsupportedError(f"No PCI address, but {text!r}, in a pci", path=self._path)
        return as_bdf(text)

    def _nvlinks(self, pci: ElementTree.Element) -> tuple[NvLink, ...]:
        found: dict[str, int] = {}
        for link in pci.iter("nvlink"):
            target = link.get("target") or ""
            # Switches have the class of bridges; virtual machines hide them: no address.
            gpu = (link.get("tclass") or "")[:6] in _GPU and is_bdf(target)
            peer = as_bdf(target) if gpu else "nvswitch"
            found[peer] = found.get(peer, 0) + (whole_number(link.get("count")) or 0)
        return tuple(NvLink(peer=peer, count=count) for peer, count in sorted(found.items()))


def _nets(pci: ElementTree.Element) -> Iterator[ElementTree.Element]:
    return (net for nic in pci.findall("nic") for net in nic.findall("net"))


def _nic_kind(net: ElementTree.Element, kind: str) -> str:
    name = net.get("name") or ""
    if kind == "0x0207":
        return "infiniband"
    if name.startswith(("efa", "rdmap")):
        return "efa"
    return "roce" if name.startswith("mlx") else "ethernet"


def _rate(net: ElementTree.Element) -> int | None:
    """Return a network's rate in MB/s; the file has Mbit/s."""
    speed = whole_number(net.get("speed"))
    return speed // 8 if speed else None
