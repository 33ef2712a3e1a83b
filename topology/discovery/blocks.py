"""Block devices: from numbers and partitions to whole disks, and down stacks to drives."""

from __future__ import annotations

import re

from tensorspill.errors import UnsupportedError
from tensorspill.topology.discovery.sysfs import Files, natural

__all__ = ["drives_below", "members", "named", "numbered", "whole"]

_CLASS = "sys/class/block"


def numbered(files: Files, numbers: str) -> str | None:
    """Return the name of the block device ``major:minor``, or None if there is none."""
    if not re.fullmatch(r"[0-9]{1,5}:[0-9]{1,8}", numbers):
        return None
    link = f"sys/dev/block/{numbers}"
    return files.real(link).rsplit("/", 1)[-1] if files.exists(link) else None


def named(files: Files, source: str) -> str | None:
    """Return the name of the block device that a path such as ``/dev/sda1`` is, or None."""
    name = source.removeprefix("/dev/")
    if name == source:
        return None
    if name.startswith(("mapper/", "disk/")):
        name = files.real(source.lstrip("/")).rsplit("/", 1)[-1]
    # The kernel writes a slash in a device's name as an exclamation mark.
    name = name.replace("/", "!")
    return name if files.exists(f"{_CLASS}/{name}") else None


def whole(files: Files, name: str) -> str:
    """Return the disk that a partition belongs to, or the name itself if it is no partition."""
    if not files.exists(f"{_CLASS}/{name}/partition"):
        return name
    steps = files.real(f"{_CLASS}/{name}").split("/")
    return steps[-2] if len(steps) > 1 else name


def members(files: Files, name: str) -> tuple[str, ...]:
    """Return the disks and stacks that a block device is made of; none for a drive."""
    names = (whole(files, slave) for slave in files.names(f"{_CLASS}/{name}/slaves"))
    return tuple(sorted(set(names), key=natural))


def drives_below(files: Files, name: str, above: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the drives at the bottom of a stack, in order; a drive is its own.

    Raises
    ------
    UnsupportedError
        The stack contains itself.
    """
    if name in above:
        chain = " → ".join((*above[above.index(name) :], name))
        raise UnsupportedError(
            f"The block device {name} is made of itself: {chain}",
            path=f"{files.root.rstrip('/')}/{_CLASS}/{name}/slaves",
        )
    below = members(files, name)
    if not below:
        return (name,)
    found = {d for member in below for d in drives_below(files, member, (*above, name))}
    return tuple(sorted(found, key=natural))
