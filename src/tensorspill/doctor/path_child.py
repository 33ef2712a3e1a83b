"""Tries a folder, in a process of its own: a file system whose server has gone waits for ever."""

from __future__ import annotations

import os
import stat
import sys
import tempfile
from typing import Any

from tensorspill.doctor.children import say
from tensorspill.errors import SpillError

__all__ = ["look"]

#: Enough for a file system to show what it demands of direct I/O.
_TRIED = 64 << 10


def look(path: str) -> dict[str, Any]:
    """Return what a path is, what holds it, and what writing to a file in it needs."""
    found: dict[str, Any] = {}
    try:
        found["kind"] = _kind(os.stat(path).st_mode)
    except OSError as error:
        found["missing"] = error.strerror
    except ValueError as error:
        return {"missing": str(error)}
    found |= _holder(path)
    if found.get("kind") == "folder":
        found |= _tried(path)
    found |= _aio()
    return found


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "folder"), (stat.S_ISREG, "file"), (stat.S_ISFIFO, "named pipe"),
             (stat.S_ISSOCK, "socket"), (stat.S_ISBLK, "block device"),
             (stat.S_ISCHR, "character device"))  # fmt: skip
    return next((name for test, name in kinds if test(mode)), "special file")


def _holder(path: str) -> dict[str, Any]:
    from tensorspill.topology.discovery.mounts import mount_of, mount_table
    from tensorspill.topology.discovery.paths import device_of
    from tensorspill.topology.discovery.sysfs import Files

    try:
        storage = device_of(path)
        entry = mount_of(mount_table(Files("/")), storage.mount)
    except SpillError as error:
        return {"unheld": str(error)}
    options = entry.options if entry is not None else ()
    return {"storage": storage.to_json(), "options": list(options)}


def _tried(path: str) -> dict[str, Any]:
    """Write a file that has no name, so that nothing stays behind, and open it past the cache."""
    from tensorspill.host_fallback.alignment import find_alignment

    found: dict[str, Any] = {}
    try:
        room = os.statvfs(path)
        found["free"] = room.f_bavail * room.f_frsize
        with tempfile.TemporaryFile(dir=path, prefix=".tensorspill-probe-") as file:
            file.write(os.urandom(_TRIED))
            file.flush()
            os.fsync(file.fileno())
            found["written"] = True
            try:
                direct = os.open(f"/proc/self/fd/{file.fileno()}", os.O_RDWR | os.O_DIRECT)
            except OSError as error:
                return found | {"indirect": error.strerror}
            try:
                alignment = find_alignment(direct)
            finally:
                os.close(direct)
    except OSError as error:
        return found | {"unwritten": error.strerror}
    if alignment is None:
        return found | {"indirect": "this file system accepts the flag, and no direct I/O"}
    return found | {
        "direct": {
            "memory": alignment.memory,
            "offset": alignment.offset,
            "source": alignment.source,
        }
    }


def _aio() -> dict[str, Any]:
    """Say whether this process may have a context of Linux AIO."""
    from tensorspill.host_fallback.context import set_up, tear_down

    context, depth = set_up(32)
    tear_down(context)
    return {"aio_depth": depth}


if __name__ == "__main__":
    say(look(sys.argv[1]))
