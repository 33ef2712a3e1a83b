"""From a path to the drives below it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.topology.discovery.blocks import drives_below, members, named, numbered, whole
from tensorspill.topology.discovery.mounts import (
    MEMORY,
    MountEntry,
    is_shared,
    mount_of,
    mount_table,
)
from tensorspill.topology.discovery.sysfs import Files
from tensorspill.topology.machine import Machine
from tensorspill.topology.record import Record

__all__ = ["Storage", "device_of", "storage_of"]

#: How many overlays and image files may lie on each other.
_DEEPEST = 8


@dataclass(frozen=True, kw_only=True)
class Storage(Record):
    """What holds the files below a path.

    Attributes
    ----------
    path : str
        The path asked for, or the nearest folder above it that exists.
    mount, filesystem : str
        Where its file system is mounted, and its type.
    kind : str
        ``"drive"``, ``"stack"`` (md, device mapper), ``"memory"``, ``"network"`` or ``"unknown"``.
    device : str or None
        The drive or stack.
    partition : str
        The partition, if it is one; may be empty.
    drives : tuple of str
        The drives at the bottom.
    """

    path: str
    mount: str = ""
    filesystem: str = ""
    kind: str = "unknown"
    device: str | None = None
    partition: str = ""
    drives: tuple[str, ...] = ()


def device_of(path: str | os.PathLike[str], root: str = "/") -> Storage:
    """Return which drives hold the files below a path.

    Partitions, bind mounts, overlays, loop devices, md, LVM and other stacks are followed down.

    Parameters
    ----------
    path : path-like
        Need not exist; then the nearest folder above it counts.
    root : str
        Folder that holds ``sys`` and ``proc``; other than ``/``, the path is looked up in that
        tree's table of mounts and not on this machine.

    Raises
    ------
    BrokenError
        The path can't be looked at.
    UnsupportedError
        The path has a null character; a stack of block devices contains itself, and the error
        names the file.
    """
    if "\0" in os.fspath(path):
        raise UnsupportedError("A path can't hold a null character", path=path)
    files = Files(root)
    return _follow(files, mount_table(files), os.path.abspath(os.fspath(path)), 0)


def storage_of(machine: Machine, path: str) -> Storage:
    """Return what `device_of` would on another machine, from its mounts alone.

    Overlays and loop devices are not followed.
    """
    inside = [m for m in machine.mounts if f"{path}/".startswith(f"{m.path.rstrip('/')}/")]
    if not inside:
        return _unknown(path, None, f"No mount of {machine.hostname or 'the machine'} holds it")
    mount = max(inside, key=lambda mount: len(mount.path))
    stack = next((stack for stack in machine.stacks if stack.name == mount.device), None)
    drives = stack.drives if stack else (mount.device,) if mount.device else ()
    kind = "stack" if stack else "drive" if drives else "network" if mount.shared else "unknown"
    return Storage(
        path=path,
        mount=mount.path,
        filesystem=mount.filesystem,
        kind=kind,
        device=mount.device,
        drives=drives,
        unknown=(("device", mount.why("device")),),
    )


def _follow(files: Files, table: list[MountEntry], path: str, depth: int) -> Storage:
    path, entry = _locate(files, table, path)
    if entry is None:
        return _unknown(path, None, f"No mount in /proc/self/mountinfo holds {path}")
    if depth > _DEEPEST:
        return _unknown(path, entry, f"More than {_DEEPEST} file systems lie on each other")
    name = numbered(files, entry.device) or named(files, entry.source)
    if name is not None:
        return _block(files, table, path, entry, name, depth)
    if entry.filesystem in ("overlay", "fuse.fuse-overlayfs"):
        return _overlay(files, table, path, entry, depth)
    return _without_block(path, entry)


def _locate(files: Files, table: list[MountEntry], path: str) -> tuple[str, MountEntry | None]:
    """Return the nearest path that exists, free of links, and its mount."""
    if os.path.realpath(files.root) != "/":
        return path, mount_of(table, path)
    try:
        while not os.path.exists(path) and path != "/":
            path = os.path.dirname(path)
        path = os.path.realpath(path)
        number = _mount_number(path)
    except (OSError, ValueError) as error:
        code = getattr(error, "errno", None)
        raise BrokenError.from_errno(code or 22, "Can't look at this path", path=path) from error
    exact = next((entry for entry in table if entry.number == number), None)
    return path, exact or mount_of(table, path)


def _mount_number(path: str) -> int | None:
    """Return the kernel's number of the mount, which is exact where mounts hide each other."""
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        text, _ = Files("/").text(f"proc/self/fdinfo/{handle}")
    finally:
        os.close(handle)
    pairs = (line.split(":", 1) for line in (text or "").splitlines() if ":" in line)
    number = {key: value.strip() for key, value in pairs}.get("mnt_id", "")
    return int(number) if number.isdecimal() else None


def _block(
    files: Files, table: list[MountEntry], path: str, entry: MountEntry, name: str, depth: int
) -> Storage:
    disk = whole(files, name)
    image, _ = files.text(f"sys/class/block/{disk}/loop/backing_file")
    if image and image.startswith("/"):
        below = _follow(files, table, image, depth + 1)
        return _on(below, path, entry, f"the image {image}")
    return Storage(
        path=path,
        mount=entry.path,
        filesystem=entry.filesystem,
        kind="stack" if members(files, disk) else "drive",
        device=disk,
        partition="" if name == disk else name,
        drives=drives_below(files, disk),
    )


def _overlay(
    files: Files, table: list[MountEntry], path: str, entry: MountEntry, depth: int
) -> Storage:
    upper = entry.option("upperdir") or (entry.option("lowerdir") or "").split(":")[0]
    if not upper:
        return _unknown(path, entry, "The overlay's options name no folder")
    if not upper.startswith("/"):
        why = f"The overlay's upper folder {upper!r} is relative to where it was mounted from"
        return _unknown(path, entry, why)
    if not files.exists(upper.lstrip("/")) or mount_of(table, upper) == entry:
        why = f"The overlay's upper folder {upper} can't be seen from this mount namespace"
        return _unknown(path, entry, why)
    return _on(_follow(files, table, upper, depth + 1), path, entry, f"the overlay's {upper}")


def _on(below: Storage, path: str, entry: MountEntry, what: str) -> Storage:
    """Return what lies below, as that of a path above."""
    why = below.why("device")
    return Storage(
        path=path,
        mount=entry.path,
        filesystem=entry.filesystem,
        kind=below.kind,
        device=below.device,
        partition=below.partition,
        drives=below.drives,
        unknown=(("device", f"of {what}: {why}"),),
    )


def _without_block(path: str, entry: MountEntry) -> Storage:
    kind, name = "unknown", entry.filesystem
    why = f"{name} (device {entry.device}, source {entry.source!r}) names no block device"
    if name in MEMORY:
        kind, why = "memory", f"{name} keeps its files in memory"
    elif is_shared(name):
        kind, why = "network", f"{name} is reached over a network: {entry.source}"
    return Storage(
        path=path, mount=entry.path, filesystem=name, kind=kind, unknown=(("device", why),)
    )


def _unknown(path: str, entry: MountEntry | None, why: str) -> Storage:
    return Storage(
        path=path,
        mount=entry.path if entry else "",
        filesystem=entry.filesystem if entry else "",
        unknown=(("device", why),),
    )
