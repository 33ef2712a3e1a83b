"""Opening files for the AIO engine: with and without O_DIRECT, preallocated, alignment known."""

from __future__ import annotations

import errno
import logging
import os

from tensorspill.engine.file import File
from tensorspill.engine.folder import Folder
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.preallocation import preallocate
from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.host_fallback.alignment import Alignment, find_alignment, is_paravirtual
from tensorspill.host_fallback.options import PAGE, AioOptions

__all__ = ["AioFile", "open_file"]

log = logging.getLogger(__name__)


class AioFile(File):
    """A file with a second descriptor for O_DIRECT, where there is direct I/O.

    Attributes
    ----------
    direct_fd : int
        -1 without direct I/O.
    """

    direct_fd: int = -1


def open_file(
    folder: Folder, name: str, flags: int, size: int | None, options: AioOptions, ledger: Ledger
) -> AioFile:
    """Open a file twice, preallocate it, and find out what direct I/O demands.

    Raises
    ------
    UnsupportedError
        ``direct="yes"`` and the file system has no direct I/O.
    BrokenError
        The operating system refused.
    """
    path = os.path.join(folder.path, name)
    existed = flags & os.O_CREAT == 0 or os.path.lexists(path)
    fds = [folder.open(name, flags)]
    try:
        if size is not None:
            preallocate(fds[0], size, path, ledger)
        direct_fd, alignment = _open_direct(folder, name, flags, options, ledger)
        if direct_fd >= 0:
            fds.append(direct_fd)
    except BaseException:
        _close(fds)
        if not existed:
            os.unlink(name, dir_fd=folder.fd)
        raise
    writable = flags & os.O_ACCMODE != os.O_RDONLY
    file = AioFile(path, fds[0], writable, ledger, lambda: _close(fds))
    if alignment is not None:
        file.direct_fd = direct_fd
        # At least a page, of which the page cache can't keep a part.
        file.granule = max(alignment.offset, PAGE)
        file.memory_alignment = alignment.memory
        file.copies_cheaply = is_paravirtual(direct_fd)
    return file


def _close(fds: list[int]) -> None:
    """Close all; the kernel lets go of a descriptor even if it has something to complain about."""
    while fds:
        try:
            os.close(fds.pop())
        except OSError as error:
            log.warning("A file was closed with an error: %s", error)


def _open_direct(
    folder: Folder, name: str, flags: int, options: AioOptions, ledger: Ledger
) -> tuple[int, Alignment | None]:
    """Open the file again with O_DIRECT; (-1, None) where it can't be used."""
    if options.direct == "no":
        return -1, None
    again = flags & ~(os.O_CREAT | os.O_TRUNC | os.O_EXCL)
    why = "the file system refuses O_DIRECT"
    try:
        fd = folder.open(name, again | os.O_DIRECT)
    except BrokenError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    else:
        alignment = find_alignment(fd)
        if alignment is not None and options.block_bytes % alignment.offset == 0:
            return fd, alignment
        os.close(fd)
        if alignment is not None:
            why = f"the file system's blocks of {alignment.offset} bytes do not divide block_bytes"
    if options.direct == "yes":
        raise UnsupportedError(
            f"Direct I/O was asked for and {why}", path=os.path.join(folder.path, name)
        )
    ledger.note(f"{folder.path}: page cache in use, {why}")
    return -1, None
