"""Network devices, from sysfs: InfiniBand, RoCE, EFA and Ethernet."""

from __future__ import annotations

import re

from tensorspill.topology.discovery.pci import PciTree
from tensorspill.topology.discovery.sysfs import Files, Reading, natural
from tensorspill.topology.machine import Nic

__all__ = ["read_nics"]

_RDMA = "sys/class/infiniband"
_NET = "sys/class/net"


def read_nics(files: Files, tree: PciTree) -> tuple[Nic, ...]:
    """Return the RDMA devices, and the network interfaces on devices that have no RDMA."""
    interfaces = _interfaces(files)
    rdma = [
        _read_rdma(files, tree, name, interfaces)
        for name in sorted(files.names(_RDMA), key=natural)
    ]
    taken = {name for nic in rdma for name in nic.interfaces} | {nic.name for nic in rdma}
    plain = [name for names in interfaces.values() for name in names if name not in taken]
    return (*rdma, *(_read_ethernet(files, tree, name) for name in sorted(plain, key=natural)))


def _interfaces(files: Files) -> dict[str, list[str]]:
    """Return the interfaces that have a device, by the real folder of that device."""
    found: dict[str, list[str]] = {}
    for name in files.names(_NET):
        folder = f"{_NET}/{name}/device"
        if files.exists(folder):
            found.setdefault(files.real(folder), []).append(name)
    return found


def _read_rdma(files: Files, tree: PciTree, name: str, interfaces: dict[str, list[str]]) -> Nic:
    folder, reading = f"{_RDMA}/{name}", Reading(files)
    device = f"{folder}/device"
    place = tree.place(device, reading)
    names = tuple(interfaces.get(files.real(device), ()))
    port = next((p for p in files.names(f"{folder}/ports") if p.isdecimal()), "1")
    rate, up = _port(f"{folder}/ports/{port}", reading)
    return Nic(
        name=name,
        kind=_kind(files, device, f"{folder}/ports/{port}"),
        bdf=place.bdf,
        parent=place.parent,
        numa_node=place.numa_node,
        cpus=place.cpus,
        interfaces=names,
        up=up,
        mbps=rate,
        link_mbps=place.link_mbps,
        unknown=reading.unknown,
    )


def _kind(files: Files, device: str, port: str) -> str:
    if files.real(f"{device}/driver").rsplit("/", 1)[-1] == "efa":
        return "efa"
    layer = files.text(f"{port}/link_layer")[0]
    return {"Ethernet": "roce", "InfiniBand": "infiniband"}.get(layer or "", "rdma")


def _port(port: str, reading: Reading) -> tuple[int | None, bool | None]:
    """Return the rate of an RDMA port in MB/s, and whether it is up."""
    text = reading.text("mbps", f"{port}/rate")
    match = re.match(r"([0-9]{1,5}(?:\.[0-9])?) Gb/sec", text or "")
    if text is not None and match is None:
        reading.reasons["mbps"] = f"/{port}/rate says {text[:20]!r}"
    state = reading.text("up", f"{port}/state")
    rate = int(float(match[1]) * 125) if match else None
    return rate, None if state is None else "ACTIVE" in state


def _read_ethernet(files: Files, tree: PciTree, name: str) -> Nic:
    folder, reading = f"{_NET}/{name}", Reading(files)
    place = tree.place(f"{folder}/device", reading)
    # Reading the speed of an interface that is down fails with EINVAL; 2^32-1 and -1 are unknown.
    speed = reading.number("mbps", f"{folder}/speed", least=1)
    if speed is not None and speed >= 1 << 31:
        reading.reasons["mbps"] = f"/{folder}/speed says {speed}"
        speed = None
    state = reading.text("up", f"{folder}/operstate")
    return Nic(
        name=name,
        bdf=place.bdf,
        parent=place.parent,
        numa_node=place.numa_node,
        cpus=place.cpus,
        interfaces=(name,),
        up=None if state in (None, "unknown") else state == "up",
        mbps=None if speed is None else speed // 8,
        link_mbps=place.link_mbps,
        unknown=reading.unknown,
    )
