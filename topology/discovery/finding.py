"""Finding out what this machine consists of."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from tensorspill.errors import SpillError
from tensorspill.topology.discovery.drives import read_drives, read_stacks
from tensorspill.topology.discovery.gpus import read_gpus
from tensorspill.topology.discovery.merging import merged
from tensorspill.topology.discovery.mounts import read_mounts
from tensorspill.topology.discovery.nics import read_nics
from tensorspill.topology.discovery.numa import read_nodes
from tensorspill.topology.discovery.nvml import ask_driver, driver_is_there
from tensorspill.topology.discovery.pci import PciTree
from tensorspill.topology.discovery.sysfs import Files
from tensorspill.topology.discovery.xml_nccl import read_nccl_xml
from tensorspill.topology.machine import Machine

__all__ = ["discover"]

Found = TypeVar("Found")

log = logging.getLogger(__name__)

#: Where NVIDIA's daemon in virtual machines leaves a description of the host.
_VIRTUAL = "var/run/nvidia-topologyd/virtualTopology.xml"


def discover(
    root: str = "/",
    *,
    nvml: bool | None = None,
    topology_file: str | None = None,
    environ: Mapping[str, str] | None = None,
) -> Machine:
    """Return what this machine consists of; never raises.

    What can't be read is None in the record concerned, with the reason, or stands in
    `Machine.notes`.

    Parameters
    ----------
    root : str
        Folder that holds ``sys`` and ``proc``, to describe another machine from a copy.
    nvml : bool, optional
        Ask the NVIDIA driver as well. By default that happens if it is loaded and the root is
        ``/``; otherwise nothing is imported for it.
    topology_file : str, optional
        A topology file of NCCL's that says how devices are connected. By default that is what
        ``NCCL_TOPO_FILE`` names, or ``/var/run/nvidia-topologyd/virtualTopology.xml``.
    environ : mapping of str, optional
        In place of this process's environment.
    """
    files, notes = Files(root), list[str]()
    here = os.path.realpath(root) == "/"
    tree = PciTree(files)
    gpus = _guarded("GPUs", lambda: read_gpus(files, tree), (), notes)
    if driver_is_there() and here if nvml is None else nvml:
        gpus = _guarded("NVML", lambda: ask_driver(gpus, notes), gpus, notes)
    nics = _guarded("NICs", lambda: read_nics(files, tree), (), notes)
    drives = _guarded("drives", lambda: read_drives(files, tree), (), notes)
    machine = Machine(
        hostname=socket.gethostname() if here else _hostname(files),
        source="sysfs" if here else f"sysfs of {root}",
        nodes=_guarded("NUMA nodes", lambda: read_nodes(files), (), notes),
        bridges=tree.bridges,
        gpus=gpus,
        nics=nics,
        drives=drives,
        stacks=_guarded("stacks", lambda: read_stacks(files, notes), (), notes),
        mounts=_guarded("mounts", lambda: read_mounts(files), (), notes),
        notes=tuple(notes),
    )
    name = topology_file or _topology_file(files, os.environ if environ is None else environ)
    return machine if name is None else _with_file(machine, name)


def _guarded(
    what: str, read: Callable[[], tuple[Found, ...]], default: tuple[Found, ...], notes: list[str]
) -> tuple[Found, ...]:
    """Return what a reader finds; should it fail, that goes to the log and the notes."""
    try:
        return read()
    except Exception as error:
        log.warning("The %s of this machine could not be read", what, exc_info=True)
        notes.append(f"{what} not read: {type(error).__name__}: {error}")
        return default


def _hostname(files: Files) -> str:
    return files.text("proc/sys/kernel/hostname")[0] or ""


def _topology_file(files: Files, environ: Mapping[str, str]) -> str | None:
    if chosen := environ.get("NCCL_TOPO_FILE"):
        return chosen
    return os.path.join(files.root, _VIRTUAL) if files.exists(_VIRTUAL) else None


def _with_file(machine: Machine, name: str) -> Machine:
    """Return the machine with what a topology file says, or with a note why it was not used."""
    notes: list[str] = []
    try:
        return merged(machine, read_nccl_xml(name))
    except SpillError as error:
        notes.append(f"NCCL's file was not used: {error}")
    except Exception as error:
        log.warning("The topology file %s could not be read", name, exc_info=True)
        notes.append(f"NCCL's file {name} not read: {type(error).__name__}: {error}")
    return replace(machine, notes=(*machine.notes, *notes))
