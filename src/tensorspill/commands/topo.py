"""``tensorspill topo``: what this machine consists of, and what is near each rank."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorspill.topology.affinity import Affinity
    from tensorspill.topology.machine import Machine

__all__ = ["HELP", "add_arguments", "run"]

HELP = "show sockets, PCIe, GPUs, NICs and drives, and what is near each rank"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--machine", metavar="NAME", help="a known machine, such as dgx-h100")
    which.add_argument("--root", default="/", metavar="FOLDER", help="where sys and proc are")
    which.add_argument("--nccl", metavar="FILE", help="read a topology file of NCCL's")
    which.add_argument("--hwloc", metavar="FILE", help="read an XML file of hwloc's (lstopo)")
    parser.add_argument("--path", metavar="PATH", help="say which drives hold it, and who is far")
    parser.add_argument("--svg", metavar="FILE", help="draw a picture (needs matplotlib)")
    parser.add_argument("--png", metavar="FILE", help="draw a picture (needs matplotlib)")
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Show a machine; return 0."""
    from tensorspill.topology.affinity import affinities

    machine = _machine(arguments)
    ranks = affinities(machine, *_ranks(machine, arguments))
    for file in filter(None, (arguments.svg, arguments.png)):
        from tensorspill.commands.topo_picture import draw

        draw(machine, file, "svg" if file == arguments.svg else "png")
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(machine, ranks, arguments.path)) + "\n")
    else:
        from tensorspill.commands.topo_text import show

        show(machine, ranks, _storage(machine, arguments.path))
    return 0


def _machine(arguments: argparse.Namespace) -> Machine:
    if arguments.machine:
        from tensorspill.topology.machines import machine

        return machine(arguments.machine)
    if arguments.nccl:
        from tensorspill.topology.discovery.xml_nccl import read_nccl_xml

        return read_nccl_xml(arguments.nccl)
    if arguments.hwloc:
        from tensorspill.topology.discovery.xml_hwloc import read_hwloc_xml

        return read_hwloc_xml(arguments.hwloc)
    from tensorspill.topology import discover

    return discover(arguments.root)


def _here(arguments: argparse.Namespace) -> bool:
    return not (arguments.machine or arguments.nccl or arguments.hwloc) and arguments.root == "/"


def _ranks(machine: Machine, arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return a GPU for each rank, and what ranks may use: here, what this process may."""
    from tensorspill.topology.process import current_process, visible_gpus

    if not _here(arguments):
        return None if machine.gpus else [None], None
    process = current_process()
    return visible_gpus(machine, process) or [None], process


def _storage(machine: Machine, path: str | None) -> Any:
    from tensorspill.topology.discovery.paths import device_of, storage_of
    from tensorspill.topology.machines import names

    if path is None:
        return None
    return storage_of(machine, path) if machine.hostname in names() else device_of(path)


def _as_json(machine: Machine, ranks: tuple[Affinity, ...], path: str | None) -> dict[str, Any]:
    from tensorspill.topology.affinity import crossing
    from tensorspill.topology.distances import distance
    from tensorspill.topology.machine import Gpu

    devices = machine.devices
    labels = [d.bdf or "" if isinstance(d, Gpu) else d.name for d in devices]
    found: dict[str, Any] = {
        "machine": machine.to_json(),
        "ranks": [rank.to_json() for rank in ranks],
        "distances": {
            "devices": labels,
            "classes": [[distance(machine, a, b).label for b in devices] for a in devices],
        },
    }
    if (storage := _storage(machine, path)) is not None:
        texts = (crossing(machine, rank, storage) for rank in ranks)
        found["path"] = storage.to_json() | {"warnings": [text for text in texts if text]}
    return found
