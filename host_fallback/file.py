"""Opening files for the AIO engine: with and without O_DIRECT, preallocated, alignment known."""

from __future__ import annotations

import errno
import functools
import logging
import os
import threading

from tensorspill.engine.file import File
from tensorspill.engine.folder import Folder
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.preallocation import preallocate
from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.host_fallback.alignment import Alignment, find_alignment, is_paravirtual
from tensorspill.host_fallback.options import PAGE, AioOptions

__all__ = ["AioFile", "Descriptors", "open_file"]

log = logging.getLogger(__name__)


class Descriptors:
    """Those of one file; apart from `AioFile`, which is released without itself.

    Parameters
    ----------
    flags : int
        With which a further descriptor of the file is opened.

    Attributes
    ----------
    direct : int
        With O_DIRECT; -1 where there is no direct I/O.
    buffered : int
        Without O_DIRECT; -1 as long as nothing needed it, then rings open it by `direct`.
    """

    __slots__ = ("_lock", "buffered", "direct", "flags")

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.direct = -1
        self.buffered = -1
        self._lock = threading.Lock()

    @property
    def any(self) -> int:
        """One of them."""
        return self.direct if self.buffered < 0 else self.buffered

    def adopt(self, fd: int) -> None:
        """Take over what a ring opened; it is closed if there is one already."""
        with self._lock:
            if self.buffered < 0:
                self.buffered = fd
                return
        _close(fd)

    def drop_direct(self) -> None:
        """Close the one with O_DIRECT."""
        fd, self.direct = self.direct, -1
        _close(fd)

    def close(self) -> None:
        """Close all; a second time does no harm."""
        fds = (self.direct, self.buffered)
        self.direct = self.buffered = -1
        for fd in fds:
            if fd >= 0:
                _close(fd)


class AioFile(File):
    """A file with descriptors with and without O_DIRECT.

    Attributes
    ----------
    descriptors : Descriptors
        Owned by this object.
    """

    descriptors: Descriptors


def open_file(
    folder: Folder, name: str, flags: int, size: int | None, options: AioOptions, ledger: Ledger
) -> AioFile:
    """Open a file, preallocate it, and find out what direct I/O demands.

    Raises
    ------
    UnsupportedError
        ``direct="yes"`` and the file system has no direct I/O.
    BrokenError
        The operating system refused.
    """
    path = os.path.join(folder.path, name)
    existed = flags & os.O_CREAT == 0 or os.path.lexists(path)
    fds = Descriptors(flags & os.O_ACCMODE | os.O_CLOEXEC)
    try:
        _open_descriptors(fds, folder, name, flags, options.direct)
        if size is not None:
            preallocate(fds.any, size, path, ledger)
        alignment = _check_direct(fds, folder, name, flags, options, ledger)
    except BaseException:
        made = not existed and fds.any >= 0
        fds.close()
        if made:
            os.unlink(name, dir_fd=folder.fd)
        raise
    writable = flags & os.O_ACCMODE != os.O_RDONLY
    file = AioFile(path, fds.any, writable, ledger, fds.close)
    file.descriptors = fds
    if alignment is not None:
        # At least a page, of which the page cache can't keep a part.
        file.granule = max(alignment.offset, PAGE)
        file.memory_alignment = alignment.memory
        file.copies_cheaply = is_paravirtual(fds.direct)
    return file


def _close(fd: int) -> None:
    """Close; the kernel lets go of a descriptor even if it has something to complain about."""
    try:
        os.close(fd)
    except OSError as error:
        log.warning("A file was closed with an error: %s", error)


def _open_descriptors(fds: Descriptors, folder: Folder, name: str, flags: int, direct: str) -> None:
    """Open a file with O_DIRECT where that can be, and without where it has to be.

    A file system that refuses O_DIRECT may do so after it has made the file.
    """
    if flags & os.O_CREAT or direct == "no" or not _can_open_again():
        fds.buffered = folder.open(name, flags)
    if direct == "no":
        return
    again = flags & ~(os.O_CREAT | os.O_TRUNC | os.O_EXCL)
    try:
        fds.direct = folder.open(name, again | os.O_DIRECT)
    except BrokenError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        if fds.buffered < 0:
            fds.buffered = folder.open(name, again)


@functools.cache
def _can_open_again() -> bool:
    """Whether rings can open a file by the descriptor that there is."""
    return os.path.exists("/proc/self/fd")


def _check_direct(
    fds: Descriptors,
    folder: Folder,
    name: str,
    flags: int,
    options: AioOptions,
    ledger: Ledger,
) -> Alignment | None:
    """Return what O_DIRECT demands; None where it can't be used, without its descriptor then."""
    if options.direct == "no":
        return None
    why = "the file system refuses O_DIRECT"
    if fds.direct >= 0:
        alignment = find_alignment(fds.direct)
        if alignment is not None and options.block_bytes % alignment.offset == 0:
            return alignment
        if alignment is not None:
            why = f"the file system's blocks of {alignment.offset} bytes do not divide block_bytes"
        if fds.buffered < 0:
            fds.buffered = folder.open(name, flags)
        fds.drop_direct()
    if options.direct == "yes":
        raise UnsupportedError(
            f"Direct I/O was asked for and {why}", path=os.path.join(folder.path, name)
        )
    ledger.note(f"{folder.path}: page cache in use, {why}")
    return None
