"""NUMA nodes and sockets, from sysfs."""

from __future__ import annotations

import re

from tensorspill.topology.discovery.sysfs import Files, Reading, cpu_list
from tensorspill.topology.machine import NumaNode

__all__ = ["read_nodes"]

_NODES = "sys/devices/system/node"
_CPUS = "sys/devices/system/cpu"


def read_nodes(files: Files) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes; one with all CPUs where the kernel knows of none."""
    indices = sorted(
        int(name[4:])
        for name in files.names(_NODES)
        if re.fullmatch(r"node(0|[1-9][0-9]{0,4})", name)
    )
    online = cpu_list(files.text(f"{_NODES}/online")[0] or "")
    if online:
        indices = [index for index in indices if index in online] or indices
    if indices:
        return tuple(_read_node(files, index) for index in indices)
    cpus = cpu_list(files.text(f"{_CPUS}/online")[0] or "") or ()
    why = f"/{_NODES} has no nodes; all CPUs are taken for one"
    socket = _socket(cpus, Reading(files)) if cpus else None
    return (NumaNode(index=0, cpus=cpus, socket=socket, unknown=(("memory_bytes", why),)),)


def _read_node(files: Files, index: int) -> NumaNode:
    folder, reading = f"{_NODES}/node{index}", Reading(files)
    cpus = reading.cpus(f"{folder}/cpulist")
    distances = (files.text(f"{folder}/distance")[0] or "").split()
    known = all(re.fullmatch(r"[0-9]{1,3}", item) for item in distances)
    return NumaNode(
        index=index,
        cpus=cpus,
        socket=_socket(cpus, reading),
        memory_bytes=_memory(files, folder, reading),
        distances=tuple(int(item) for item in distances) if known else (),
        unknown=reading.unknown,
    )


def _socket(cpus: tuple[int, ...], reading: Reading) -> int | None:
    """Return the package of a node's first CPU; a node does not cross packages."""
    if not cpus:
        reading.reasons["socket"] = "it has no CPUs"
        return None
    return reading.number("socket", f"{_CPUS}/cpu{cpus[0]}/topology/physical_package_id")


def _memory(files: Files, folder: str, reading: Reading) -> int | None:
    text, why = files.text(f"{folder}/meminfo")
    match = re.search(r"MemTotal:\s+([0-9]{1,15}) kB", text or "")
    if match is None:
        reading.reasons["memory_bytes"] = why or f"/{folder}/meminfo has no MemTotal"
        return None
    return int(match[1]) << 10
