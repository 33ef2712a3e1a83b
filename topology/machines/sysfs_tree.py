"""Writing a machine as the tree of sysfs and procfs that discovery reads."""

from __future__ import annotations

import os

from tensorspill.topology.machine import Device, Drive, Gpu, Machine, Nic, Stack
from tensorspill.topology.machines.rates import link_of_rate

__all__ = ["write_sysfs"]

_DEVICES = "sys/devices"
_CLASSES = {"infiniband": "0x020700"}
_LAYERS = {"infiniband": "InfiniBand", "roce": "Ethernet", "efa": "Unspecified"}


def write_sysfs(machine: Machine, root: str, *, flat: bool = False) -> None:
    """Write the files from which `discover` finds a machine; a file is written once, none is read.

    Parameters
    ----------
    machine : Machine
        What NVML alone says of it (NVLinks, memory) has no place in sysfs.
    root : str
        An empty folder.
    flat : bool
        Show each device below a host bridge of its own and without a NUMA node, as virtual
        machines do.
    """
    tree = _Tree(machine, root, flat)
    tree.write_nodes()
    for gpu in machine.gpus:
        tree.write_gpu(gpu)
    for nic in machine.nics:
        tree.write_nic(nic)
    for number, drive in enumerate(machine.drives):
        tree.write_drive(drive, f"259:{number}")
    for number, stack in enumerate(machine.stacks):
        tree.write_stack(stack, f"9:{number}")
    tree.write_proc()


class _Tree:
    """Writes files below a root."""

    def __init__(self, machine: Machine, root: str, flat: bool) -> None:
        self._machine = machine
        self._root = root
        self._flat = flat
        self._numbers: dict[str, str] = {}

    def write_nodes(self) -> None:
        nodes = self._machine.nodes
        self._file(f"{_DEVICES}/system/node/online", _listed([n.index for n in nodes]))
        for node in nodes:
            folder = f"{_DEVICES}/system/node/node{node.index}"
            self._file(f"{folder}/cpulist", _listed(node.cpus))
            if node.distances:
                self._file(f"{folder}/distance", " ".join(map(str, node.distances)))
            if node.memory_bytes is not None:
                size = node.memory_bytes >> 10
                self._file(f"{folder}/meminfo", f"Node {node.index} MemTotal:  {size} kB")
            if node.cpus and node.socket is not None:
                cpu = f"{_DEVICES}/system/cpu/cpu{node.cpus[0]}/topology"
                self._file(f"{cpu}/physical_package_id", str(node.socket))

    def write_gpu(self, gpu: Gpu) -> None:
        folder = self._device(gpu, "0x030200", "0x10de")
        if folder and gpu.uuid:
            text = f"Model: \t\t {gpu.name}\nGPU UUID: \t {gpu.uuid}\n"
            self._file(f"proc/driver/nvidia/gpus/{gpu.bdf}/information", text)

    def write_nic(self, nic: Nic) -> None:
        folder = self._device(nic, _CLASSES.get(nic.kind, "0x020000"), "0x15b3")
        if not folder:
            return
        if nic.kind == "efa":
            os.makedirs(os.path.join(self._root, "sys/bus/pci/drivers/efa"), exist_ok=True)
            self._link(f"{folder}/driver", "sys/bus/pci/drivers/efa")
        for name in nic.interfaces:
            self._class("net", name, f"{folder}/net/{name}", folder)
            self._file(f"{folder}/net/{name}/operstate", "up" if nic.up else "down")
            if nic.mbps is not None:
                self._file(f"{folder}/net/{name}/speed", str(nic.mbps * 8))
        if nic.kind == "ethernet":
            return
        own = f"{folder}/infiniband/{nic.name}"
        self._class("infiniband", nic.name, own, folder)
        self._file(f"{own}/ports/1/link_layer", _LAYERS.get(nic.kind, "Unspecified"))
        if nic.up is not None:
            self._file(f"{own}/ports/1/state", "4: ACTIVE" if nic.up else "1: DOWN")
        if nic.mbps is not None:
            self._file(f"{own}/ports/1/rate", f"{nic.mbps // 125} Gb/sec (4X NDR)")

    def write_drive(self, drive: Drive, number: str) -> None:
        folder = self._device(drive, "0x010802", "0x144d")
        if not folder:
            return
        controller = f"{folder}/nvme/{drive.controller}"
        self._class("nvme", drive.controller, controller, folder)
        self._file(f"{controller}/transport", drive.transport)
        self._file(f"{controller}/state", "live")
        self._file(f"{controller}/model", drive.model)
        self._block(drive.name, f"{controller}/{drive.name}", number, drive.capacity)

    def write_stack(self, stack: Stack, number: str) -> None:
        folder = f"{_DEVICES}/virtual/block/{stack.name}"
        self._block(stack.name, folder, number, stack.capacity)
        self._file(f"{folder}/md/level", stack.kind)
        for member in stack.members:
            self._link(f"{folder}/slaves/{member}", f"sys/class/block/{member}")

    def write_proc(self) -> None:
        self._file("proc/sys/kernel/hostname", self._machine.hostname)
        lines = ["1 0 0:1 / / rw - rootfs rootfs rw"]
        for index, mount in enumerate(self._machine.mounts, 2):
            number = self._numbers.get(mount.device or "", f"0:{index}")
            path = mount.path.replace(" ", "\\040")
            source = mount.source or "none"
            lines.append(f"{index} 1 {number} / {path} rw - {mount.filesystem} {source} rw")
        self._file("proc/self/mountinfo", "\n".join(lines))

    def _device(self, device: Device, kind: str, vendor: str) -> str | None:
        """Write a device's own folder and those of its bridges, and return it."""
        if device.bdf is None or (device.parent is None and not self._flat):
            return None
        above = [] if self._flat else list(reversed(self._machine.ancestors(device)))
        steps = [bridge.name for bridge in above] or [f"pci{device.bdf[:-5]}"]
        folder = f"{_DEVICES}/{'/'.join(steps)}/{device.bdf}"
        for depth, bridge in enumerate(above[1:], 2):
            own = f"{_DEVICES}/{'/'.join(steps[:depth])}"
            self._pci(own, bridge.name, "0x060400", "0x1000", bridge.numa_node, bridge.link_mbps)
        node = None if self._flat else device.numa_node
        self._pci(folder, device.bdf, kind, vendor, node, device.link_mbps)
        if device.cpus and not self._flat:
            self._file(f"{folder}/local_cpulist", _listed(device.cpus))
        return folder

    def _pci(
        self, folder: str, name: str, kind: str, vendor: str, node: int | None, rate: int | None
    ) -> None:
        entry = f"sys/bus/pci/devices/{name}"
        if os.path.lexists(os.path.join(self._root, entry)):
            return
        self._file(f"{folder}/class", kind)
        self._file(f"{folder}/vendor", vendor)
        self._file(f"{folder}/numa_node", str(-1 if node is None else node))
        if rate is not None:
            speed, lanes = link_of_rate(rate)
            self._file(f"{folder}/current_link_speed", speed)
            self._file(f"{folder}/current_link_width", lanes)
        self._link(entry, folder)

    def _class(self, kind: str, name: str, folder: str, device: str) -> None:
        os.makedirs(os.path.join(self._root, folder), exist_ok=True)
        self._link(f"{folder}/device", device)
        self._link(f"sys/class/{kind}/{name}", folder)

    def _block(self, name: str, folder: str, number: str, capacity: int | None) -> None:
        self._numbers[name] = number
        os.makedirs(os.path.join(self._root, folder), exist_ok=True)
        for entry in (f"sys/block/{name}", f"sys/class/block/{name}", f"sys/dev/block/{number}"):
            self._link(entry, folder)
        if capacity is not None:
            self._file(f"{folder}/size", str(capacity >> 9))

    def _file(self, path: str, text: str) -> None:
        full = os.path.join(self._root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        with open(full, "w", encoding="utf-8") as file:
            file.write(f"{text}\n")

    def _link(self, path: str, target: str) -> None:
        """Make a link that is relative, as the kernel's are."""
        full = os.path.join(self._root, path)
        os.makedirs(os.path.dirname(full), exist_ok=True)
        os.symlink(os.path.relpath(target, os.path.dirname(path)), full)


def _listed(numbers: list[int] | tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))
