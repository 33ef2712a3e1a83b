"""The folder that spill files live in: making it, and making sure that it is ours."""

from __future__ import annotations

import errno
import os
import stat

from tensorspill.errors import BrokenError, PermissionDeniedError, UnsupportedError

__all__ = ["FILE_MODE", "MARKER", "enter", "make_place", "mark", "refused"]

MARKER = ".tensorspill"
MARKER_TEXT = b"Temporary files of tensorspill. Safe to delete when no process uses them.\n"
FOLDER_MODE = 0o700
FILE_MODE = 0o600

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def make_place(place: str) -> None:
    """Make the place that a user named, and check that nobody else can put things there.

    Raises
    ------
    UnsupportedError
        It is a symbolic link, or no folder.
    PermissionDeniedError, BrokenError
        It is somebody else's, or the operating system refused.
    """
    try:
        _make_folders(place)
        found = os.lstat(place)
    except FileExistsError as error:
        raise UnsupportedError("The place for spill files is no folder", path=place) from error
    except OSError as error:
        if error.errno == errno.ENOTDIR:
            raise UnsupportedError("A part of the path is no folder", path=place) from error
        raise refused(error, "Can't make the place for spill files", place) from error
    if stat.S_ISLNK(found.st_mode):
        raise UnsupportedError(
            "The place for spill files is a symbolic link",
            path=place,
            remedy=f"Name the folder that it leads to: {os.path.realpath(place)}",
        )
    shared = found.st_mode & stat.S_ISVTX and found.st_mode & stat.S_IWOTH
    # The administrator's folders are as trustworthy as our own: who owns them can do anything.
    if found.st_uid not in (os.geteuid(), 0) and not shared:
        raise _somebody_elses(place)


def _make_folders(path: str) -> None:
    """Make a folder and its parents, all with the same mode, which `os.makedirs` does not."""
    if os.path.isdir(path):
        return
    if not os.path.lexists(os.path.dirname(path)):
        _make_folders(os.path.dirname(path))
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        if not os.path.isdir(path):  # else another process was faster
            raise


def enter(path: str) -> int:
    """Return a descriptor of our folder, which is made if missing and checked in any case.

    Raises
    ------
    UnsupportedError
        It is a symbolic link or a file, or has another mode.
    PermissionDeniedError, BrokenError
        It is somebody else's, or the operating system refused.
    """
    try:
        os.mkdir(path, FOLDER_MODE)
        made = True
    except FileExistsError:
        made = False
    except OSError as error:
        raise refused(error, "Can't make the folder for spill files", path) from error
    try:
        fd = os.open(path, _DIRECTORY)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR):
            raise UnsupportedError(
                "The folder for spill files is a symbolic link or a file", path=path
            ) from error
        raise refused(error, "Can't open the folder for spill files", path) from error
    try:
        _check_folder(fd, path, made)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_folder(fd: int, path: str, made: bool) -> None:
    if made:
        os.fchmod(fd, FOLDER_MODE)
    found = os.fstat(fd)
    if found.st_uid != os.geteuid():
        raise _somebody_elses(path)
    if found.st_mode & 0o777 != FOLDER_MODE:
        raise UnsupportedError(
            f"The folder for spill files has mode {found.st_mode & 0o777:04o}, not 0700",
            path=path,
            remedy="If it is yours: chmod 700",
        )


def mark(fd: int, path: str) -> None:
    """Put the marker into a new folder.

    Raises
    ------
    UnsupportedError
        The folder has other files and no marker.
    BrokenError
        The operating system refused.
    """
    try:
        if _marked(fd):
            return
        # Another process may have made the marker, and then files, since.
        if os.listdir(fd) and not _marked(fd):
            raise UnsupportedError(
                "The folder for spill files holds files and no marker of ours",
                path=path,
                remedy="Empty or rename it, or use another place",
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        marker = os.open(MARKER, flags, FILE_MODE, dir_fd=fd)
        try:
            os.write(marker, MARKER_TEXT)
        finally:
            os.close(marker)
    except OSError as error:
        raise refused(error, "Can't mark the folder for spill files", path) from error


def _marked(fd: int) -> bool:
    try:
        return stat.S_ISREG(os.stat(MARKER, dir_fd=fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


def refused(error: OSError, message: str, path: str) -> BrokenError:
    """Return the error for what the operating system refused."""
    return BrokenError.from_oserror(error, message, path=path)


def _somebody_elses(path: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        "The folder belongs to another user",
        errno=errno.EPERM,
        path=path,
        remedy="Use a folder of your own",
    )
