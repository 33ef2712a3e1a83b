"""Recycled extents: files of removed checkpoints that the next one is written into.

Overwriting extents that hold data is faster than writing into new ones, which the file system has
to allocate, convert and journal. A file is recycled only when nothing else may see it change: it
has left its checkpoint, has one name, and nobody has it open.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import secrets
import stat

from tensorspill.errors import BrokenError

__all__ = ["IN_PENDING", "IN_ROOT", "NAME", "drop", "keep", "take"]

log = logging.getLogger(__name__)

#: Where recycled files are: in a folder of checkpoints, and in a checkpoint that is being saved.
IN_ROOT = ".tensorspill-recycled"
IN_PENDING = "recycled"

#: What we call them there; anything else is not ours.
NAME = re.compile(r"[0-9a-f]{16}", re.ASCII)

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REGULAR = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

#: A much longer file is left for whoever needs one.
_SLACK = 1 << 20


def take(folder: str, name: str, nbytes: int) -> int:
    """Give a recycled file a new name in a pending checkpoint, if there is one of a good size.

    Any process may do that; of two that want the same file, one gets it.

    Returns
    -------
    int
        Bytes of the new content that will overwrite extents; 0 if there was no such file.
    """
    try:
        recycled = os.open(os.path.join(folder, IN_PENDING), _DIRECTORY)
    except OSError:
        return 0
    try:
        sizes = {found.name: found.stat(follow_symlinks=False) for found in os.scandir(recycled)}
        usable = {
            found: status.st_size
            for found, status in sizes.items()
            if NAME.fullmatch(found)
            and stat.S_ISREG(status.st_mode)
            and 0 < status.st_size <= 2 * nbytes + _SLACK
        }
        # The smallest that is large enough, else the largest.
        for found in sorted(usable, key=lambda n: (usable[n] < nbytes, abs(usable[n] - nbytes))):
            try:
                os.rename(found, os.path.join(folder, name), src_dir_fd=recycled)
            except FileNotFoundError:
                continue
            return min(usable[found], nbytes)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't take recycled files", path=folder) from error
    finally:
        os.close(recycled)
    return 0


def drop(folder: str) -> bool:
    """Remove the recycled files of a pending checkpoint, for want of space; False if none."""
    place = os.path.join(folder, IN_PENDING)
    try:
        recycled = os.open(place, _DIRECTORY)
    except OSError:
        return False
    dropped = False
    try:
        for name in filter(NAME.fullmatch, os.listdir(recycled)):
            os.unlink(name, dir_fd=recycled)
            dropped = True
    except OSError as error:
        log.info("Can't remove recycled files in %s: %s", place, error)
    finally:
        os.close(recycled)
    return dropped


def keep(folder: int, name: str, recycled: int) -> int:
    """Move a file among the recycled ones if that is safe, and remove it if not.

    Parameters
    ----------
    folder, recycled : int
        Descriptors of the file's folder and of that for recycled files.
    name : str
        Of the file.

    Returns
    -------
    int
        Bytes kept; 0 if it was removed.
    """
    ours = secrets.token_hex(8)
    os.rename(name, ours, src_dir_fd=folder, dst_dir_fd=recycled)
    # Under its new name nobody opens it any more; who has it open shows now.
    try:
        fd = os.open(ours, _REGULAR, dir_fd=recycled)
    except OSError as error:
        log.info("Can't recycle %s: %s", name, error)
    else:
        try:
            found = os.fstat(fd)
            if _unused(fd, found):
                return found.st_size
        finally:
            os.close(fd)
    os.unlink(ours, dir_fd=recycled)
    return 0


def _unused(fd: int, found: os.stat_result) -> bool:
    """Whether this descriptor is the only way to a file's bytes."""
    if not stat.S_ISREG(found.st_mode) or found.st_nlink != 1 or found.st_uid != os.geteuid():
        return False
    try:
        # The kernel grants a write lease only on a file that nobody else has open or mapped.
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return False
    return True
