"""The folder of a job's checkpoints: its lock, what is in it, and what may be removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from typing import NamedTuple

from tensorspill.checkpoint.files import recycling
from tensorspill.checkpoint.files.durable import FILE_MODE, sync_folder
from tensorspill.checkpoint.files.manifest import FIRST_LINE
from tensorspill.checkpoint.files.names import (
    MANIFEST,
    REMOVED,
    SAVING,
    is_checkpoint_name,
    is_file_name,
)
from tensorspill.errors import BrokenError, BusyError, UnsupportedError

__all__ = ["Known", "Root", "open_folder"]

log = logging.getLogger(__name__)

FOLDER_MODE = 0o700

#: In every folder that we made; in the root it is also the lock.
MARKER = ".tensorspill-checkpoint"
MARKER_TEXT = b"Made by tensorspill; see manifest.json.\n"

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_REGULAR = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_FIRST_LINE_BYTES = 256


class Known(NamedTuple):
    """A committed checkpoint: its number and name."""

    sequence: int
    name: str


class Root:
    """An open folder of checkpoints.

    Parameters
    ----------
    path : str or path
    make : bool
        Make the folder if it is missing, durably.

    Attributes
    ----------
    path : str
        Absolute.
    fd : int
        Descriptor of the folder; -1 once closed.
    """

    def __init__(self, path: str | os.PathLike[str], *, make: bool = False) -> None:
        self.path = os.path.abspath(os.fspath(path))
        self._lock = -1
        self._pid = os.getpid()
        if make:
            _make_folders(self.path)
        self.fd = open_folder(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that opened it."""
        return os.getpid() != self._pid

    # -- the lock ------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the lock that all savers of all processes share; until `close`.

        Raises
        ------
        BusyError
            Another job has it.
        BrokenError
            The folder can't be written, or its file system has no locks.
        """
        path = os.path.join(self.path, MARKER)
        try:
            fd = os.open(MARKER, os.O_RDWR | os.O_CREAT | _REGULAR, FILE_MODE, dir_fd=self.fd)
        except OSError as error:
            raise BrokenError.from_oserror(error, "Can't open the lock", path=path) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(fd)
            raise BusyError(
                "Another job is saving a checkpoint to this folder",
                path=self.path,
                remedy="Wait for it, or give each job a folder of its own",
            ) from error
        except OSError as error:
            os.close(fd)
            raise BrokenError.from_oserror(
                error, "The file system can't lock files", path=path
            ) from error
        self._lock = fd

    def close(self) -> None:
        """Let go of lock and folder; a second time does no harm. In a forked child they stay."""
        lock, self._lock = self._lock, -1
        fd, self.fd = self.fd, -1
        if lock >= 0:
            if not self.forked:
                # Closing would not do: a forked child may have the same open file.
                fcntl.flock(lock, fcntl.LOCK_UN)
            os.close(lock)
        if fd >= 0:
            os.close(fd)

    # -- what is there -------------------------------------------------------------------------

    def checkpoints(self) -> list[Known]:
        """Return the committed checkpoints, the newest first."""
        found = []
        for name in self._names():
            if is_checkpoint_name(name):
                sequence = self._sequence(name)
                if sequence is not None:
                    found.append(Known(sequence, name))
        return sorted(found, reverse=True)

    def leftovers(self) -> list[str]:
        """Return the folders that failed saves and removals left."""
        return sorted(
            name
            for name in self._names()
            if name.endswith((SAVING, REMOVED))
            and is_checkpoint_name(name.rsplit(".", 1)[0])
            and self._is_ours(name)
        )

    def exists(self, name: str) -> bool:
        """Whether anything has that name."""
        try:
            os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise self._refused(error, "Can't look for a name", name) from error
        return True

    def _names(self) -> list[str]:
        try:
            return os.listdir(self.fd)
        except OSError as error:
            raise self._refused(error, "Can't list the folder", "") from error

    def _sequence(self, name: str) -> int | None:
        """Return a checkpoint's number; None if that is none."""
        try:
            fd = os.open(f"{name}/{MANIFEST}", os.O_RDONLY | _REGULAR, dir_fd=self.fd)
        except OSError:
            return None
        try:
            first = FIRST_LINE.match(os.read(fd, _FIRST_LINE_BYTES))
        except OSError:
            return None
        finally:
            os.close(fd)
        return None if first is None else int(first[1])

    def _is_ours(self, name: str) -> bool:
        """Whether this user made a folder with us: by its marker, or empty as at the start."""
        try:
            with _opened(self.fd, name) as fd:
                status = os.fstat(fd)
                if status.st_uid != os.geteuid():
                    return False
                names = os.listdir(fd)
        except OSError:
            return False
        return not names or MARKER in names

    # -- making and removing -------------------------------------------------------------------

    def make(self, name: str) -> None:
        """Make a folder of ours.

        Raises
        ------
        UnsupportedError
            Something has that name.
        BrokenError
            The operating system refused.
        """
        try:
            os.mkdir(name, FOLDER_MODE, dir_fd=self.fd)
            with _opened(self.fd, name) as fd:
                marker = os.open(
                    MARKER, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _REGULAR, FILE_MODE, dir_fd=fd
                )
                try:
                    os.write(marker, MARKER_TEXT)
                finally:
                    os.close(marker)
        except FileExistsError as error:
            raise UnsupportedError(
                "This is in the way of a checkpoint, and not ours to remove",
                path=os.path.join(self.path, name),
            ) from error
        except OSError as error:
            raise self._refused(error, "Can't make the folder", name) from error

    def removable(self, name: str) -> bool:
        """Whether a folder has nothing but what we put there."""
        try:
            with _opened(self.fd, name) as fd:
                foreign = [n for n in os.listdir(fd) if not _is_known(n)]
        except OSError as error:
            log.warning("Can't look into %s/%s: %s", self.path, name, error)
            return False
        if foreign:
            log.warning("%s/%s is not removed: it has %s", self.path, name, foreign[0])
        return not foreign and self._is_ours(name)

    def remove(self, name: str, *, recycle: bool = False) -> bool:
        """Remove a folder of ours. False if it stays.

        Parameters
        ----------
        name : str
        recycle : bool
            Keep its data files as recycled ones, where that is safe and there is room.

        Raises
        ------
        BrokenError
            The operating system refused.
        """
        if not self.removable(name):
            return False
        recycled = self._recycled(make=True) if recycle else -1
        try:
            with _opened(self.fd, name) as fd:
                self._return_lent(fd)
                _empty(fd, recycled)
            os.rmdir(name, dir_fd=self.fd)
        except OSError as error:
            raise self._refused(error, "Can't remove the folder", name) from error
        finally:
            if recycled >= 0:
                os.close(recycled)
        return True

    def _return_lent(self, folder: int) -> None:
        """Take back the recycled files that a save was lent and did not use."""
        try:
            os.rename(
                recycling.IN_PENDING, recycling.IN_ROOT, src_dir_fd=folder, dst_dir_fd=self.fd
            )
        except OSError as error:
            # There may be none, or others that were recycled meanwhile.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                raise

    def return_lent(self, name: str) -> None:
        """Take back the recycled files that a save was lent and did not use.

        Raises
        ------
        BrokenError
            The operating system refused.
        """
        try:
            with _opened(self.fd, name) as fd:
                self._return_lent(fd)
        except OSError as error:
            raise self._refused(error, "Can't keep recycled files", name) from error

    def _recycled(self, *, make: bool = False) -> int:
        """Return a descriptor of the folder for recycled files; -1 if there can't be one."""
        try:
            if make:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(recycling.IN_ROOT, FOLDER_MODE, dir_fd=self.fd)
            return os.open(recycling.IN_ROOT, DIRECTORY, dir_fd=self.fd)
        except OSError as error:
            log.info("No files are recycled: %s", error)
            return -1

    def trim(self, most: int) -> None:
        """Remove recycled files beyond `most` bytes, the smallest first."""
        fd = self._recycled()
        if fd < 0:
            return
        try:
            entries = (e for e in os.scandir(fd) if recycling.NAME.fullmatch(e.name))
            sizes = sorted((e.stat(follow_symlinks=False).st_size, e.name) for e in entries)
            for nbytes, name in reversed(sizes):
                most -= nbytes
                if most < 0:
                    os.unlink(name, dir_fd=fd)
        except OSError as error:
            log.warning("Can't remove recycled files: %s", error)
        finally:
            os.close(fd)

    def rename(self, old: str, new: str) -> None:
        """Rename something, which replaces an empty folder at most; raises `BrokenError`."""
        try:
            os.rename(old, new, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        except OSError as error:
            raise self._refused(error, f"Can't rename {old}", new) from error

    def _refused(self, error: OSError, message: str, name: str) -> BrokenError:
        return BrokenError.from_oserror(error, message, path=os.path.join(self.path, name))


def open_folder(path: str, flags: int = DIRECTORY) -> int:
    """Return a descriptor of a folder; raises `UnsupportedError` if it is none."""
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise UnsupportedError("This is no folder, or a link", path=path) from error
        raise BrokenError.from_oserror(error, "Can't open the folder", path=path) from error


@contextlib.contextmanager
def _opened(folder: int, name: str) -> Iterator[int]:
    fd = os.open(name, DIRECTORY, dir_fd=folder)
    try:
        yield fd
    finally:
        os.close(fd)


def _is_known(name: str) -> bool:
    """Whether we could have put that into a checkpoint's folder."""
    return is_file_name(name) or name in (
        MARKER,
        MANIFEST,
        f"{MANIFEST}.new",
        recycling.IN_PENDING,
    )


def _empty(folder: int, recycled: int) -> None:
    """Remove what is in a folder, the marker last: a folder without it is nobody's to remove."""
    for name in os.listdir(folder):
        if name == recycling.IN_PENDING:
            with _opened(folder, name) as fd:
                for found in filter(recycling.NAME.fullmatch, os.listdir(fd)):
                    os.unlink(found, dir_fd=fd)
            os.rmdir(name, dir_fd=folder)
        elif recycled >= 0 and is_file_name(name):
            recycling.keep(folder, name, recycled)
        elif name != MARKER:
            os.unlink(name, dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(MARKER, dir_fd=folder)


def _make_folders(path: str) -> None:
    """Make a folder and its parents, each durable in its own parent."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_folders(parent)
    try:
        os.mkdir(path, FOLDER_MODE)
    except FileExistsError:
        return  # another rank was faster; or it is a file, which opening it will say
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't make the folder", path=path) from error
    sync_folder(parent)
