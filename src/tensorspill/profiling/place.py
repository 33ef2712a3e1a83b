"""A folder to measure in: checked for room, and gone afterwards, however the run ends.

What is killed outright leaves its folder behind. It is known by its name, its marker and a lock
that nobody holds, and the next run beside it removes it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tensorspill.errors import BrokenError, NoSpaceError
from tensorspill.pool.sizes import format_bytes

__all__ = ["PREFIX", "check_room", "room_in", "working_folder"]

log = logging.getLogger(__name__)

PREFIX = "tensorspill-bench-"
MARKER = ".tensorspill-bench"

_ENDING = (signal.SIGTERM, signal.SIGHUP)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

#: Left free on the file system, or a twentieth of a small one: one that is full is a slow one.
_SPARE = 1 << 30


@contextmanager
def working_folder(parent: str | os.PathLike[str], needed: int) -> Iterator[Path]:
    """Make a folder inside `parent` and remove it at the end.

    SIGTERM and SIGHUP end the run as Ctrl-C does, so that the folder goes then as well.

    Raises
    ------
    NoSpaceError
        There are not `needed` bytes free.
    MissingFileError, PermissionDeniedError, BrokenError
        No folder can be made there.
    """
    _sweep(parent)
    check_room(parent, needed)
    before = _catch_endings()
    folder, lock = Path(), -1
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=os.path.abspath(parent)))
        lock = _lock(folder)
        yield folder
    except OSError as error:
        if lock >= 0:
            raise
        raise BrokenError.from_oserror(
            error, "Can't make a folder to measure in", path=parent
        ) from error
    finally:
        if folder.name.startswith(PREFIX):
            shutil.rmtree(folder, ignore_errors=True)
        if lock >= 0:
            os.close(lock)
        for number, handler in before.items():
            signal.signal(number, handler)


def room_in(parent: str | os.PathLike[str]) -> int:
    """Return the bytes that may be taken of the file system of a folder, without filling it.

    Raises
    ------
    MissingFileError, PermissionDeniedError, BrokenError
        It can't be asked.
    """
    try:
        room = os.statvfs(parent)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't use the folder", path=parent) from error
    spare = min(_SPARE, room.f_blocks * room.f_frsize // 20)
    return max(0, room.f_bavail * room.f_frsize - spare)


def check_room(parent: str | os.PathLike[str], needed: int) -> None:
    """Raise `NoSpaceError` unless `needed` bytes may be taken; see `room_in`."""
    free = room_in(parent)
    if free < needed:
        raise NoSpaceError(
            f"The run needs {format_bytes(needed)}, and {format_bytes(free)} can be taken without "
            f"filling the drive",
            path=parent,
            remedy="Ask for a smaller size, free some space, or use another folder",
        ).with_free(free)


def _catch_endings() -> dict[signal.Signals, Any]:
    """Let signals end the run by an exception; only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found: dict[signal.Signals, Any] = {}
    for number in _ENDING:
        # What nobody handles ends the process without a word.
        if signal.getsignal(number) is signal.SIG_DFL:
            found[number] = signal.signal(number, _end)
    return found


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _lock(folder: Path) -> int:
    """Mark a folder as ours, and as in use for as long as the descriptor is open."""
    fd = os.open(folder, _DIRECTORY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.close(os.open(folder / MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError as error:
        # Some network file systems have no locks; without its marker nobody removes the folder.
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            os.close(fd)
            raise
    return fd


def _sweep(parent: str | os.PathLike[str]) -> None:
    """Remove what runs that were killed left in a folder."""
    try:
        names = [name for name in os.listdir(parent) if name.startswith(PREFIX)]
    except OSError:
        return  # whoever makes a folder there is told
    for name in names:
        path = os.path.join(parent, name)
        try:
            fd = os.open(path, _DIRECTORY)
        except OSError:
            continue
        try:
            if _is_left_over(fd):
                log.info("Removing what a run that was killed left behind: %s", path)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def _is_left_over(fd: int) -> bool:
    """Whether a folder is ours and nobody uses it; it is locked then."""
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) != 0o700:
        return False
    try:
        marker = os.stat(MARKER, dir_fd=fd, follow_symlinks=False)
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return stat.S_ISREG(marker.st_mode)
