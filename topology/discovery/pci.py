"""The PCIe tree: where a device sits, from the real path of its folder in sysfs."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from tensorspill.topology.bdf import as_bdf, is_bdf
from tensorspill.topology.discovery.sysfs import Files, Reading
from tensorspill.topology.machine import Bridge

__all__ = ["PciTree", "Place"]

_HOST = re.compile(r"pci[0-9a-f]{4,8}:[0-9a-f]{2}")
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")

#: What a bridge is, by what is above it: ports and switches alternate below a root port.
_BELOW = {"host": "root-port", "root-port": "switch", "switch": "port", "port": "switch"}


class Place(NamedTuple):
    """Where a PCI device sits, with the fields that `Gpu`, `Nic` and `Drive` share."""

    bdf: str | None
    parent: str | None
    numa_node: int | None
    cpus: tuple[int, ...]
    link_mbps: int | None


class PciTree:
    """Collects the bridges above the devices that are asked for."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._bridges: dict[str, Bridge] = {}
        #: By parent, the first NUMA node that is known of what is below.
        self._below: dict[str, int] = {}

    @property
    def bridges(self) -> tuple[Bridge, ...]:
        """Those found so far, by name; a host bridge has the NUMA node of what is below it."""
        return tuple(
            replace(bridge, numa_node=self._below[name])
            if bridge.kind == "host" and name in self._below
            else bridge
            for name, bridge in sorted(self._bridges.items())
        )

    def place(self, folder: str, reading: Reading) -> Place:
        """Return where a device sits and keep the bridges above it.

        Parameters
        ----------
        folder : str
            A folder of sysfs that is the device, or lies below it.
        reading : Reading
            Takes the reasons of what is unknown.
        """
        path = self._files.real(folder)
        steps = path.split("/")
        chain = [i for i, step in enumerate(steps) if _HOST.fullmatch(step) or _is_address(step)]
        if not chain or not is_bdf(steps[chain[-1]]):
            why = f"/{path} is no PCI device"
            reading.reasons |= dict.fromkeys(("bdf", "parent", "numa_node", "link_mbps"), why)
            return Place(None, None, None, (), None)
        parent = ""
        for index in chain[:-1]:
            parent = self._bridge("/".join(steps[: index + 1]), parent)
        own = "/".join(steps[: chain[-1] + 1])
        if not parent:
            reading.reasons["parent"] = f"/{own} is below no host bridge"
        numa_node = reading.number("numa_node", f"{own}/numa_node")
        if numa_node is not None:
            self._below.setdefault(parent, numa_node)
        return Place(
            bdf=as_bdf(steps[chain[-1]]),
            parent=parent or None,
            numa_node=numa_node,
            cpus=reading.cpus(f"{own}/local_cpulist"),
            link_mbps=reading.link("link_mbps", own),
        )

    def _bridge(self, folder: str, parent: str) -> str:
        """Keep the bridge at a folder, and return its name."""
        name = folder.rsplit("/", 1)[-1]
        if name in self._bridges:
            return name
        reading = Reading(self._files)
        above = self._bridges.get(parent)
        if above is None:
            kind = "host" if _HOST.fullmatch(name) else "bridge"
        else:
            # A host bridge below a device is a virtual one, of Intel's VMD.
            kind = "bridge" if _HOST.fullmatch(name) else _BELOW.get(above.kind, "bridge")
        numa_node = None
        if _HOST.fullmatch(name):
            why = f"/{folder} does not say, nor does what is below it"
            reading.reasons |= {"numa_node": why, "link_mbps": f"/{folder} has no link"}
        else:
            numa_node = reading.number("numa_node", f"{folder}/numa_node")
            if numa_node is not None:
                self._below.setdefault(parent, numa_node)
        self._bridges[name] = Bridge(
            name=name,
            parent=parent,
            kind=kind,
            numa_node=numa_node,
            link_mbps=None if _HOST.fullmatch(name) else reading.link("link_mbps", folder),
            unknown=reading.unknown,
        )
        return name


def _is_address(step: str) -> bool:
    return _ADDRESS.fullmatch(step) is not None
