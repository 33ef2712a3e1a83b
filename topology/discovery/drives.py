"""Drives and what is stacked on them, from sysfs."""

from __future__ import annotations

import re

from tensorspill.errors import UnsupportedError
from tensorspill.topology.discovery.blocks import drives_below, members
from tensorspill.topology.discovery.pci import PciTree, Place
from tensorspill.topology.discovery.sysfs import Files, Reading, natural
from tensorspill.topology.machine import Drive, Stack

__all__ = ["read_drives", "read_stacks"]

_BLOCK = "sys/block"

#: Memory, files, optical and floppy drives, and the hidden path of a multipath namespace.
_NO_DRIVE = re.compile(r"(loop|ram|zram|sr|fd|nbd|mtdblock)[0-9]+|nvme[0-9]+c[0-9]+n[0-9]+")
_NAMESPACE = re.compile(r"nvme[0-9]+n[0-9]+")
_CONTROLLER = re.compile(r"nvme[0-9]+")
_NOT_MEASURED = "not measured"


def read_drives(files: Files, tree: PciTree) -> tuple[Drive, ...]:
    """Return the whole disks that are made of no other, by name."""
    names = [name for name in files.names(_BLOCK) if not _NO_DRIVE.fullmatch(name)]
    alone = (name for name in names if not _is_stack(files, name))
    return tuple(_read_drive(files, tree, name) for name in sorted(alone, key=natural))


def read_stacks(files: Files, notes: list[str]) -> tuple[Stack, ...]:
    """Return the block devices made of others; those made of themselves go to the notes."""
    names = [name for name in files.names(_BLOCK) if _is_stack(files, name)]
    return tuple(_read_stack(files, name, notes) for name in sorted(names, key=natural))


def _is_stack(files: Files, name: str) -> bool:
    folder = f"{_BLOCK}/{name}"
    return bool(files.names(f"{folder}/slaves")) or any(
        files.exists(f"{folder}/{kind}") for kind in ("md", "dm")
    )


def _read_drive(files: Files, tree: PciTree, name: str) -> Drive:
    reading = Reading(files)
    reading.reasons |= {"write_mbps": _NOT_MEASURED, "read_mbps": _NOT_MEASURED}
    folder = files.real(f"{_BLOCK}/{name}")
    controllers = _controllers(files, folder) if _NAMESPACE.fullmatch(name) else []
    transport, places = "", [_place(tree, f"{_BLOCK}/{name}", "", reading)]
    if controllers:
        transport = files.text(f"{controllers[0]}/transport")[0] or ""
        places = [_place(tree, path, transport, reading) for path in controllers]
    place = places[0]
    more = (p.bdf for p in places[1:] if p.bdf and p.bdf != place.bdf)
    model = files.text(f"{(controllers or [f'{folder}/device'])[0]}/model")[0]
    return Drive(
        name=name,
        kind=_kind(name, folder),
        model=model or "",
        transport=transport,
        controller=controllers[0].rsplit("/", 1)[-1] if controllers else "",
        bdf=place.bdf,
        more_bdfs=tuple(dict.fromkeys(more)),
        parent=place.parent,
        numa_node=place.numa_node,
        cpus=place.cpus,
        capacity=_capacity(name, reading),
        link_mbps=place.link_mbps,
        unknown=reading.unknown,
    )


def _place(tree: PciTree, folder: str, transport: str, reading: Reading) -> Place:
    if transport in ("", "pcie"):
        return tree.place(folder, reading)
    why = f"it is reached over {transport}"
    reading.reasons |= dict.fromkeys(("bdf", "parent", "numa_node", "link_mbps"), why)
    return Place(None, None, None, (), None)


def _controllers(files: Files, folder: str) -> list[str]:
    """Return the folders of a namespace's controllers, live ones first.

    With multipath, the namespace lies in its subsystem, beside links to the controllers.
    """
    above = folder.rsplit("/", 1)[0]
    if _CONTROLLER.fullmatch(above.rsplit("/", 1)[-1]):
        return [above]
    names = [name for name in files.names(above) if _CONTROLLER.fullmatch(name)]
    found = [files.real(f"{above}/{name}") for name in sorted(names, key=natural)]
    return sorted(found, key=lambda path: files.text(f"{path}/state")[0] != "live")


def _kind(name: str, folder: str) -> str:
    if name.startswith("nvme"):
        return "nvme"
    if re.search(r"/virtio[0-9]+/", folder):
        return "virtio"
    return "scsi" if re.search(r"/target[0-9:]+/", folder) else "other"


def _capacity(name: str, reading: Reading) -> int | None:
    # The kernel counts in sectors of 512 bytes, whatever the drive's are.
    sectors = reading.number("capacity", f"{_BLOCK}/{name}/size")
    return None if sectors is None else sectors << 9


def _read_stack(files: Files, name: str, notes: list[str]) -> Stack:
    reading, folder = Reading(files), f"{_BLOCK}/{name}"
    try:
        drives = drives_below(files, name)
    except UnsupportedError as error:
        notes.append(str(error))
        drives = ()
    return Stack(
        name=name,
        kind=_stack_kind(files, folder),
        label=files.text(f"{folder}/dm/name")[0] or "",
        members=members(files, name),
        drives=() if drives == (name,) else drives,
        capacity=_capacity(name, reading),
        unknown=reading.unknown,
    )


def _stack_kind(files: Files, folder: str) -> str:
    """Return the level of an array, or the first word of a mapping's UUID, such as "lvm"."""
    if level := files.text(f"{folder}/md/level")[0]:
        return level
    uuid = files.text(f"{folder}/dm/uuid")[0] or ""
    return uuid.split("-", 1)[0].lower() if "-" in uuid else ""
