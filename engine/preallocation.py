"""Growing a file before it is written, so that its blocks lie together and the room is there."""

from __future__ import annotations

import errno
import os

from tensorspill.engine.ledger import Ledger
from tensorspill.errors import BrokenError, NoSpaceError

__all__ = ["preallocate"]


def preallocate(fd: int, size: int, path: str, ledger: Ledger) -> None:
    """Grow a file to at least `size` bytes, with blocks allocated where the file system can.

    Raises
    ------
    NoSpaceError
        There is no room; the file has the length that it had.
    """
    held = os.fstat(fd).st_size
    if size <= held:
        return
    try:
        os.posix_fallocate(fd, held, size - held)
    except OSError as error:
        os.ftruncate(fd, held)
        if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
            raise _no_room(error, fd, size, path) from error
        ledger.note(f"{path}: the file system can't preallocate; the file is sparse")
        try:
            os.ftruncate(fd, size)
        except OSError as refused:
            raise _no_room(refused, fd, size, path) from refused


def _no_room(error: OSError, fd: int, size: int, path: str) -> BrokenError:
    broken = BrokenError.from_oserror(error, "Can't preallocate the file", path=path, nbytes=size)
    if isinstance(broken, NoSpaceError):
        room = os.fstatvfs(fd)
        broken.with_free(room.f_bavail * room.f_frsize)
    return broken
