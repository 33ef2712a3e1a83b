"""Making names durable: a file's bytes are, after fsync; its name is when its folder is."""

from __future__ import annotations

import os

from tensorspill.errors import BrokenError

__all__ = ["open_directory", "sync_fd", "sync_folder", "write_text"]

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE_MODE = 0o600


def sync_fd(fd: int, path: str) -> None:
    """Make a file or folder durable; raises `BrokenError`."""
    try:
        os.fsync(fd)
    except OSError as error:
        raise BrokenError.from_oserror(error, "fsync failed", path=path) from error


def open_directory(path: str) -> int:
    """Return a descriptor of a folder; raises `BrokenError`."""
    try:
        return os.open(path, _DIRECTORY)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't open the folder", path=path) from error


def sync_folder(path: str) -> None:
    """Make the names in a folder durable; raises `BrokenError`."""
    fd = open_directory(path)
    try:
        sync_fd(fd, path)
    finally:
        os.close(fd)


def write_text(folder: int, name: str, data: bytes, path: str) -> None:
    """Put a file with `data` in place of whatever has that name, durably and in one step.

    Parameters
    ----------
    folder : int
        Descriptor of the folder.
    name : str
    data : bytes
    path : str
        Of the folder, for errors.

    Raises
    ------
    BrokenError
        It failed; under that name is what was there before, unless the folder's own fsync failed.
    """
    temporary = f"{name}.new"
    where = os.path.join(path, name)
    try:
        try:
            os.unlink(temporary, dir_fd=folder)
        except FileNotFoundError:
            pass
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(temporary, flags, FILE_MODE, dir_fd=folder)
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(fd, view) :]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.fsync(folder)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't write the file", path=where) from error
