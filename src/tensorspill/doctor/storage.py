"""The folder, the file system and drives below it, and what direct I/O demands of them."""

from __future__ import annotations

from typing import Any

from tensorspill.doctor.children import Answer
from tensorspill.doctor.row import Row
from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import format_bytes
from tensorspill.topology.discovery.paths import Storage
from tensorspill.topology.machine import Machine

__all__ = ["alignment", "block_device", "file_system", "folder", "storage_in"]

#: File systems that cuFile knows, on drives of the machine and over a network.
_LOCAL = ("ext4", "xfs")
_NETWORK = ("nfs", "nfs4", "lustre", "wekafs", "gpfs", "beegfs", "vast")
_NVME = "Use a folder on ext4 or XFS on an NVMe drive of this machine"
_LITTLE = 1 << 30


def storage_in(tried: Answer) -> Storage | None:
    """Return what holds the path, as the child found it."""
    try:
        return Storage.from_json(tried["storage"]) if "storage" in tried else None
    except UnsupportedError:
        return None


def folder(path: str, tried: Answer) -> Row:
    """Look at whether files can be written where the user wants them."""
    if "problem" in tried:
        remedy = "Look after the file system's server or drive" if tried.get("hung") else ""
        return Row("", "no", f"{path}: {tried['problem']}", remedy)
    if "missing" in tried:
        return Row("", "no", f"{path}: {tried['missing']}", "Make the folder, or name another")
    if tried.get("kind") != "folder":
        return Row("", "no", f"{path} is a {tried.get('kind')}", "Name a folder")
    if not tried.get("written"):
        why = tried.get("unwritten", "not tried")
        return Row("", "no", f"{path}: {why}", "Use a folder that this user may write to")
    free = int(tried.get("free", 0))
    said = f"{path} can be written to, {format_bytes(free)} free"
    return Row("", "ok", said, "Little room: free some space" if free < _LITTLE else "")


def file_system(storage: Storage | None, tried: Answer) -> Row:
    """Look at whether cuFile knows the file system."""
    if storage is None:
        return Row("", "unknown", _unheld(tried))
    options = [option for option in tried.get("options", ()) if option.startswith("data=")]
    said = f"{storage.filesystem or 'unknown'} mounted at {storage.mount or 'an unknown place'}"
    if storage.filesystem == "ext4" and options and options[0] != "data=ordered":
        return Row("", "no", f"{said} with {options[0]}", "Mount it with data=ordered")
    if storage.filesystem in _LOCAL:
        return Row("", "ok", said)
    if storage.filesystem in _NETWORK:
        return Row("", "ok", f"{said}; over a network cuFile needs RDMA")
    known = ", ".join((*_LOCAL, *_NETWORK))
    return Row("", "no", f"{said}, which cuFile does not know (it knows {known})", _NVME)


def block_device(machine: Machine, storage: Storage | None, tried: Answer) -> Row:
    """Look at whether the drives below can move bytes to a GPU."""
    if storage is None:
        return Row("", "unknown", _unheld(tried))
    if storage.kind == "memory":
        return Row("", "no", f"{storage.filesystem} keeps its files in memory", _NVME)
    if storage.kind == "network":
        return Row("", "unknown", storage.why("device") or "reached over a network")
    if not storage.drives:
        return Row("", "unknown", storage.why("device") or "no block device is known", _NVME)
    drives = [drive for drive in machine.drives if drive.name in storage.drives]
    kinds = {drive.name: f"{drive.kind} {drive.transport}".strip() for drive in drives}
    named = [f"{name} ({kinds.get(name, 'unknown kind')})" for name in storage.drives]
    said = ", ".join(named)
    if storage.kind == "stack":
        said = f"{storage.device} of {said}"
        kind = next((s.kind for s in machine.stacks if s.name == storage.device), "")
        if kind == "raid0":
            return Row("", "unknown", f"{said}; RAID 0 works with nvidia-fs, not with P2PDMA")
    if all(kind == "nvme pcie" for kind in kinds.values()) and len(kinds) == len(storage.drives):
        several = [drive.name for drive in drives if drive.more_bdfs]
        if several:
            said = f"{said}; several paths lead to {', '.join(several)}"
            return Row("", "no", said, "Load nvme_core with multipath=N")
        return Row("", "ok", said)
    return Row("", "no", said, _NVME)


def alignment(storage: Storage | None, tried: Answer) -> Row:
    """Look at what O_DIRECT demands, and whether there is any."""
    if found := tried.get("direct"):
        said = f"addresses {_bytes(found['memory'])}, offsets {_bytes(found['offset'])}"
        return Row("", "ok", f"{said} (by {found['source']})")
    if "indirect" in tried:
        remedy = "The page cache is used; for direct I/O use ext4 or XFS"
        return Row("", "no", f"no O_DIRECT here: {tried['indirect']}", remedy)
    if storage is None:
        return Row("", "unknown", _unheld(tried))
    return Row("", "unknown", "it takes a file that can be written to find out")


def _bytes(multiple: Any) -> str:
    return f"at multiples of {multiple} bytes"


def _unheld(tried: Answer) -> str:
    return str(tried.get("unheld") or tried.get("problem") or tried.get("missing") or "not known")
