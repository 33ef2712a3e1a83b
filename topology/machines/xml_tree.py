"""Writing a machine as NCCL's or hwloc's XML."""

from __future__ import annotations

from xml.etree import ElementTree

from tensorspill.topology.machine import Bridge, Device, Gpu, Machine, Nic, NumaNode
from tensorspill.topology.machines.rates import link_of_rate

__all__ = ["hwloc_xml", "nccl_xml"]

Element = ElementTree.Element


def nccl_xml(machine: Machine) -> str:
    """Return a topology file for ``NCCL_TOPO_FILE``; it has no place for drives."""
    system = Element("system", version="1")
    cpus = {node.index: _cpu(system, node) for node in machine.nodes if not node.memory_only}
    switches: dict[str, Element] = {}
    devices: tuple[Device, ...] = (*machine.gpus, *machine.nics)
    for device in devices:
        parent = cpus.get(-1 if device.numa_node is None else device.numa_node)
        if parent is None or device.bdf is None:
            continue
        for bridge in reversed(machine.ancestors(device)):
            if bridge.kind == "switch":
                if bridge.name not in switches:
                    switches[bridge.name] = _pci(parent, bridge.name, "0x060400", bridge.link_mbps)
                parent = switches[bridge.name]
        _nccl_device(parent, device)
    return ElementTree.tostring(system, encoding="unicode")


def _cpu(system: Element, node: NumaNode) -> Element:
    return ElementTree.SubElement(
        system, "cpu", numaid=str(node.index), affinity=_mask(node.cpus, ""), arch="x86_64"
    )


def _pci(above: Element, bdf: str, kind: str, rate: int | None) -> Element:
    speed, lanes = ("", "0") if rate is None else link_of_rate(rate)
    return ElementTree.SubElement(
        above, "pci", {"busid": bdf, "class": kind, "link_speed": speed, "link_width": lanes}
    )


def _nccl_device(above: Element, device: Device) -> None:
    bdf = device.bdf or ""
    if isinstance(device, Gpu):
        pci = _pci(above, bdf, "0x030200", device.link_mbps)
        gpu = ElementTree.SubElement(pci, "gpu", dev=str(device.index), sm="90", gdr="1")
        for link in device.nvlinks:
            switch = link.peer == "nvswitch"
            ElementTree.SubElement(
                gpu,
                "nvlink",
                target="ffffffff:ffff:ff" if switch else link.peer,
                count=str(link.count),
                tclass="0x068000" if switch else "0x030200",
            )
    elif isinstance(device, Nic):
        kind = "0x020700" if device.kind == "infiniband" else "0x020000"
        pci = _pci(above, bdf, kind, device.link_mbps)
        net = ElementTree.SubElement(ElementTree.SubElement(pci, "nic"), "net", name=device.name)
        if device.mbps is not None:
            net.set("speed", str(device.mbps * 8))


def hwloc_xml(machine: Machine, version: int = 2) -> str:
    """Return what ``lstopo --of xml`` would say of CPUs, bridges and devices."""
    top = Element("topology", version=f"{version}.0")
    root = ElementTree.SubElement(top, "object", type="Machine", os_index="0")
    ElementTree.SubElement(root, "info", name="HostName", value=machine.hostname)
    writer = _Hwloc(machine, version)
    for socket in machine.sockets:
        package = writer.add(root, "Package", os_index=str(socket.index))
        for index in socket.nodes:
            group = writer.add(package, "Group")
            writer.write_node(group, index)
    for node in machine.nodes:
        if node.socket is None:
            writer.write_node(root, node.index)
    return ElementTree.tostring(top, encoding="unicode")


class _Hwloc:
    """Writes objects."""

    def __init__(self, machine: Machine, version: int) -> None:
        self._machine = machine
        self._version = version
        self._below: dict[str, list[Device | Bridge]] = {}
        items: tuple[Device | Bridge, ...] = (*machine.bridges, *machine.devices)
        for item in items:
            if item.parent:
                self._below.setdefault(item.parent, []).append(item)

    def add(self, above: Element, kind: str, **attributes: str) -> Element:
        return ElementTree.SubElement(above, "object", {"type": kind} | attributes)

    def write_node(self, above: Element, index: int) -> None:
        """Write a node and the host bridges that are next to it."""
        node = next(node for node in self._machine.nodes if node.index == index)
        element = self.add(
            above, "NUMANode", os_index=str(node.index), cpuset=_mask(node.cpus, "0x")
        )
        if node.memory_bytes is not None:
            element.set("local_memory", str(node.memory_bytes))
        for bridge in self._machine.bridges:
            if bridge.kind == "host" and bridge.numa_node == index and not node.memory_only:
                domain, bus = bridge.name.removeprefix("pci").split(":")
                pci = f"{domain}:[{bus}-ff]"
                host = self.add(above, "Bridge", bridge_type="0-1", bridge_pci=pci)
                self._write_below(host, bridge.name)

    def _write_below(self, above: Element, name: str) -> None:
        for item in self._below.get(name, []):
            if isinstance(item, Bridge):
                element = self.add(above, "Bridge", bridge_type="1-1", pci_busid=item.name)
                _set_link(element, item.link_mbps)
                self._write_below(element, item.name)
            else:
                self._write_device(above, item)

    def _write_device(self, above: Element, device: Device) -> None:
        element = self.add(above, "PCIDev", pci_busid=device.bdf or "")
        _set_link(element, device.link_mbps)
        if isinstance(device, Gpu):
            element.set("pci_type", "0302 [10de:2330] [10de:0000] a1")
            ElementTree.SubElement(element, "info", name="PCIDevice", value=device.name)
            if device.uuid:
                own = self.add(element, "OSDev", name="nvml0", osdev_type=self._kind(1))
                ElementTree.SubElement(own, "info", name="NVIDIAUUID", value=device.uuid)
        elif isinstance(device, Nic):
            number = "0207" if device.kind == "infiniband" else "0200"
            element.set("pci_type", f"{number} [15b3:1021] [15b3:0000] 00")
            for name in device.interfaces:
                self.add(element, "OSDev", name=name, osdev_type=self._kind(2))
            if device.kind != "ethernet":
                self.add(element, "OSDev", name=device.name, osdev_type=self._kind(3))
        else:
            element.set("pci_type", "0108 [144d:a80a] [144d:0000] 00")
            own = self.add(element, "OSDev", name=device.name, osdev_type=self._kind(0))
            size = str((device.capacity or 0) >> 10)
            ElementTree.SubElement(own, "info", name="Size", value=size)

    def _kind(self, number: int) -> str:
        """Return a type: block 0, GPU 1, network 2, OpenFabrics 3; a bit of it in version 3."""
        return str(number) if self._version < 3 else f"0x{1 << (0, 2, 4, 5)[number]:x}"


def _set_link(element: Element, rate: int | None) -> None:
    if rate is not None:
        element.set("pci_link_speed", f"{rate / 1000:.6f}")


def _mask(cpus: tuple[int, ...], prefix: str) -> str:
    """Return numbers as words of 32 bits, the last one first."""
    value = sum(1 << cpu for cpu in cpus)
    words = [
        f"{prefix}{value >> 32 * i & 0xFFFFFFFF:08x}" for i in range(max(cpus, default=0) // 32 + 1)
    ]
    return ",".join(reversed(words))
