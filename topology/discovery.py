"""Finding out what this machine consists of."""

from __future__ import annotations

import logging
import os
import socket

from tensorspill.topology.drives import read_drives, read_stacks
from tensorspill.topology.gpus import read_gpus
from tensorspill.topology.machine import Machine
from tensorspill.topology.mounts import read_mounts
from tensorspill.topology.nics import read_nics
from tensorspill.topology.numa import read_nodes
from tensorspill.topology.pci import PciTree
from tensorspill.topology.sysfs import Files

__all__ = ["discover"]

log = logging.getLogger(__name__)


def discover(root: str = "/") -> Machine:
    """Return what this machine consists of; never raises.

    Parameters
    ----------
    root : str
        Folder that holds ``sys`` and ``proc``.
    """
    files = Files(root)
    here = os.path.realpath(root) == "/"
    notes: list[str] = []
    tree = PciTree(files)
    gpus, nics = read_gpus(files, tree), read_nics(files, tree)
    drives = read_drives(files, tree)
    return Machine(
        hostname=_hostname(files, here),
        source="sysfs" if here else f"sysfs of {root}",
        nodes=read_nodes(files),
        bridges=tree.bridges,
        gpus=gpus,
        nics=nics,
        drives=drives,
        stacks=read_stacks(files, notes),
        mounts=read_mounts(files),
        notes=tuple(notes),
    )


def _hostname(files: Files, here: bool) -> str:
    if here:
        return socket.gethostname()
    return files.text("proc/sys/kernel/hostname")[0] or ""
