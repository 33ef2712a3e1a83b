"""The table of mounts, and the block device below each file system."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tensorspill.topology.discovery.blocks import named, numbered, whole
from tensorspill.topology.discovery.sysfs import Files
from tensorspill.topology.machine import Mount

__all__ = ["MEMORY", "MountEntry", "is_shared", "mount_of", "mount_table", "read_mounts"]

_TABLE = "proc/self/mountinfo"
_MOST = 16 << 20

#: File systems in memory, and those that hold no files of a user's.
MEMORY = frozenset({"tmpfs", "ramfs", "hugetlbfs", "devtmpfs"})
# fmt: off
_PSEUDO = frozenset({
    "autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts",
    "devtmpfs", "efivarfs", "fusectl", "mqueue", "nsfs", "proc", "pstore", "rootfs", "rpc_pipefs",
    "securityfs", "selinuxfs", "sysfs", "tracefs",
})
_SHARED = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "gfs2", "glusterfs", "gpfs", "lustre", "nfs",
    "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "quobyte", "smb3", "smbfs", "virtiofs", "wekafs",
})
# fmt: on


@dataclass(frozen=True)
class MountEntry:
    """One line of mountinfo: numbers of the mount and device, places, type, source, options."""

    number: int
    device: str
    root: str
    path: str
    filesystem: str
    source: str
    options: tuple[str, ...]

    def option(self, name: str) -> str | None:
        """Return the value of an option of the file system, or None."""
        prefix = f"{name}="
        found = (item.removeprefix(prefix) for item in self.options if item.startswith(prefix))
        return next(found, None)


def mount_table(files: Files) -> list[MountEntry]:
    """Return the mounts that this process sees, oldest first; lines of another form are skipped."""
    text, _ = files.text(_TABLE, _MOST)
    entries = (_parse(line) for line in (text or "").splitlines())
    return [entry for entry in entries if entry is not None]


def mount_of(table: list[MountEntry], path: str) -> MountEntry | None:
    """Return the mount that holds a real path: the longest, and of those the youngest."""
    best: MountEntry | None = None
    for entry in table:
        inside = path == entry.path or path.startswith(f"{entry.path.rstrip('/')}/")
        if inside and (best is None or len(entry.path) >= len(best.path)):
            best = entry
    return best


def is_shared(filesystem: str) -> bool:
    """Return whether a type of file system is reached over a network or from a host."""
    kind, _, program = filesystem.partition(".")
    # FUSE may be anything; what is known to be local is named.
    if kind in ("fuse", "fuseblk"):
        return program not in ("", "ntfs", "ntfs-3g", "exfat", "overlayfs", "fuse-overlayfs")
    return filesystem in _SHARED


def read_mounts(files: Files) -> tuple[Mount, ...]:
    """Return the mounted file systems that can hold files, by path; the youngest of each."""
    visible = {entry.path: entry for entry in mount_table(files)}
    return tuple(
        _mount(files, entry)
        for _, entry in sorted(visible.items())
        if entry.filesystem not in _PSEUDO
    )


def _mount(files: Files, entry: MountEntry) -> Mount:
    name = numbered(files, entry.device) or named(files, entry.source)
    shared = is_shared(entry.filesystem)
    why = "it is reached over a network" if shared else f"{entry.filesystem} names no block device"
    return Mount(
        path=entry.path,
        filesystem=entry.filesystem,
        source=entry.source,
        device=None if name is None else whole(files, name),
        shared=shared,
        unknown=(("device", why),),
    )


def _parse(line: str) -> MountEntry | None:
    before, dash, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    if not dash or len(head) < 6 or len(tail) < 2 or not re.fullmatch("[0-9]{1,9}", head[0]):
        return None
    return MountEntry(
        number=int(head[0]),
        device=head[2],
        root=_plain(head[3]),
        path=_plain(head[4]),
        filesystem=tail[0],
        source=_plain(tail[1]),
        options=tuple(_plain(item) for item in tail[2].split(",")) if len(tail) > 2 else (),
    )


def _plain(text: str) -> str:
    r"""Undo the kernel's escapes, such as ``\040`` for a space."""
    return re.sub(r"\\([0-3][0-7]{2})", lambda match: chr(int(match[1], 8)), text)
