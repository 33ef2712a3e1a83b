"""The folder that an engine works in: names stay inside it and links are not followed."""

from __future__ import annotations

import errno
import os
import weakref

from tensorspill.errors import BrokenError, UnsupportedError

__all__ = ["FILE_MODE", "MODES", "Folder"]

FILE_MODE = 0o600
#: Parts that a name may not have.
_LEADS_ELSEWHERE = frozenset(("", ".", ".."))

#: Mode → flags. "w" may also be read from: what was written is usually read back.
MODES: dict[str, int] = {
    "r": os.O_RDONLY,
    "r+": os.O_RDWR,
    "w": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "w+": os.O_RDWR | os.O_CREAT | os.O_TRUNC,
    "x": os.O_RDWR | os.O_CREAT | os.O_EXCL,
}


class Folder:
    """An open directory; files are opened relative to it, component by component.

    Parameters
    ----------
    path : str or path
        Must exist.

    Raises
    ------
    MissingFileError, PermissionDeniedError, BrokenError
        It does not exist, may not be entered, or is no directory.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.fspath(path))
        try:
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise BrokenError.from_oserror(
                error, "Can't open the folder", path=self.path
            ) from error
        # For engines that are dropped and not closed.
        self._release = weakref.finalize(self, os.close, self.fd)
        self._release.atexit = False

    def open(self, name: str, flags: int) -> int:
        """Open a file in the folder and return its descriptor.

        Raises
        ------
        UnsupportedError
            The name is empty, absolute, or leads out of the folder, or passes through a link.
        BrokenError
            The operating system refused; `MissingFileError` if there is no such file.
        """
        parts = name.split("/")
        if not _LEADS_ELSEWHERE.isdisjoint(parts) or "\0" in name:
            raise UnsupportedError(f"The name {name!r} does not stay in the folder", path=self.path)
        parent = self.fd
        try:
            for part in parts[:-1]:
                below = os.open(
                    part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent
                )
                self._leave(parent)
                parent = below
            return os.open(
                parts[-1], flags | os.O_NOFOLLOW | os.O_CLOEXEC, FILE_MODE, dir_fd=parent
            )
        except OSError as error:
            path = os.path.join(self.path, name)
            if error.errno in (errno.ELOOP, errno.ENOTDIR):
                raise UnsupportedError("Links in a folder are not followed", path=path) from error
            raise BrokenError.from_oserror(error, "Can't open the file", path=path) from error
        finally:
            self._leave(parent)

    def _leave(self, fd: int) -> None:
        if fd != self.fd:
            os.close(fd)

    def close(self) -> None:
        """Close the directory; a second time does no harm."""
        self._release()
        self.fd = -1
