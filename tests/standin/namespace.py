"""Run a command in a mount namespace of its own, where udev knows this machine's drives.

The real cuFile asks udev's database for the file system of a drive and refuses (5027, 5030) where
there is none, as in a container. Used as ``python -m tests.standin.namespace COMMAND...``.
"""

from __future__ import annotations

import ctypes
import os
import sys
import tempfile
from pathlib import Path

CLONE_NEWNS = 0x00020000
MS_REC, MS_PRIVATE = 0x4000, 0x40000

ENTRY = """\
S:disk/by-uuid/00000000-0000-0000-0000-000000000000
I:1
E:ID_FS_USAGE=filesystem
E:ID_FS_TYPE=ext4
E:ID_FS_UUID=00000000-0000-0000-0000-000000000000
E:ID_FS_VERSION=1.0
G:systemd
V:1
"""


def main(command: list[str]) -> None:
    """Become `command`; end with a message and 1 where that is not allowed."""
    entry = Path("/run/udev/data") / f"b{_device(tempfile.gettempdir())}"
    if not _knows(entry):
        _enter_namespace()
        _mount(b"tmpfs", b"/run", b"tmpfs", 0)
        entry.parent.mkdir(parents=True)
        Path("/run/udev/tags").mkdir()
        Path("/run/udev/control").touch()
        entry.write_text(ENTRY)
    os.execvp(command[0], command)


def _device(folder: str) -> str:
    number = os.stat(folder).st_dev
    if os.major(number) == 0:
        raise SystemExit(f"{folder} is on no block device, which cuFile needs")
    return f"{os.major(number)}:{os.minor(number)}"


def _knows(entry: Path) -> bool:
    try:
        return "ID_FS_USAGE=" in entry.read_text()
    except OSError:
        return False


def _enter_namespace() -> None:
    if _libc().unshare(CLONE_NEWNS):
        raise SystemExit(f"no mount namespace of its own: {os.strerror(ctypes.get_errno())}")
    # What is mounted from here on stays in here.
    _mount(b"none", b"/", b"", MS_REC | MS_PRIVATE)


def _mount(source: bytes, target: bytes, kind: bytes, flags: int) -> None:
    if _libc().mount(source, target, kind, ctypes.c_ulong(flags), None):
        raise SystemExit(f"can't mount {target.decode()}: {os.strerror(ctypes.get_errno())}")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


if __name__ == "__main__":
    main(sys.argv[1:])
