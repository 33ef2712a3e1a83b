"""The folder that spill files live in: ours alone, marked, with a lock for every file in use."""

from __future__ import annotations

import errno
import fcntl
import itertools
import logging
import os
import re
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tensorspill.errors import UnsupportedError
from tensorspill.spill.place import FILE_MODE, MARKER, enter, make_place, mark, refused

__all__ = ["Claim", "SpillFolder"]

log = logging.getLogger(__name__)

SPILL_NAME = re.compile(r"[A-Za-z0-9_]+-\d+-\d+\.spill")

_REGULAR = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class SpillFolder:
    """Our own folder in a place that the user named, and the files in it.

    The folder is ``<place>/tensorspill-<user id>``, mode 0700, with a marker file. Nothing is ever
    removed but spill files: our own at the end, and those of processes that died, which are known
    by their name and by a lock that nobody holds. Several processes may use one place at a time.

    Parameters
    ----------
    place : str or path
        Made if missing, its parents too, with mode 0700. Usually a folder on a local NVMe drive.

    Attributes
    ----------
    path : str
        Absolute path of our own folder.

    Raises
    ------
    UnsupportedError
        The place or our folder is a symbolic link or no folder, or our folder has another mode,
        or holds files and no marker.
    PermissionDeniedError
        One of them belongs to another user, or may not be written.
    BrokenError
        The operating system refused otherwise.
    """

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.place = os.path.abspath(os.fspath(place))
        self.path = os.path.join(self.place, f"tensorspill-{os.geteuid()}")
        make_place(self.place)
        fd = enter(self.path)
        try:
            mark(fd, self.path)
        finally:
            os.close(fd)

    def claim(self, label: str | None = None) -> Claim:
        """Make a new, empty spill file, and hold its lock for as long as the claim lives.

        Files of processes that died are removed on the way.

        Parameters
        ----------
        label : str, optional
            First part of the file's name, of letters, digits and underscores; the rank in the
            environment (``RANK``) if not given.

        Raises
        ------
        BrokenError
            The operating system refused; `PermissionDeniedError` where the folder can't be
            written.
        UnsupportedError
            The label has other characters, or the folder was replaced by something that isn't
            ours.
        """
        label = _rank_label() if label is None else label
        if not SPILL_NAME.fullmatch(f"{label}-0-0.spill"):
            raise UnsupportedError(f"A label has letters, digits and underscores, not {label!r}")
        folder = enter(self.path)
        try:
            # Between its making and its locking a file looks like a leftover, so both happen
            # under the same lock as the search for leftovers.
            with _locked_marker(folder, self.path):
                _remove_leftovers(folder, self.path)
                name, fd = _create(folder, label, self.path)
        except BaseException:
            os.close(folder)
            raise
        return Claim(self.path, name, folder, fd)

    def __repr__(self) -> str:
        return f"<SpillFolder {self.path!r}>"


class Claim:
    """One spill file, made by `SpillFolder.claim`; removed by `release` or with the claim.

    Attributes
    ----------
    name, path : str
        Of the file, in the folder and absolute.
    """

    def __init__(self, folder_path: str, name: str, folder: int, fd: int) -> None:
        self.name = name
        self.path = os.path.join(folder_path, name)
        self._end = weakref.finalize(self, _give_up, name, folder, fd, os.getpid())

    @property
    def released(self) -> bool:
        """Whether `release` was called."""
        return not self._end.alive

    def release(self) -> None:
        """Remove the file, then let go of its lock; a second time does no harm.

        In a forked child this removes nothing: the file is the parent's.
        """
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"<Claim {self.path!r}{' released' if self.released else ''}>"


def _give_up(name: str, folder: int, fd: int, pid: int) -> None:
    """Remove a claimed file if it is still the one that was made, and close the descriptors."""
    if os.getpid() == pid:
        try:
            found = os.stat(name, dir_fd=folder, follow_symlinks=False)
            if os.path.samestat(found, os.fstat(fd)):
                os.unlink(name, dir_fd=folder)
        except OSError as error:
            if error.errno != errno.ENOENT:
                log.warning("Can't remove the spill file %s: %s", name, error)
        # Closing would not do: a forked child may have the same open file.
        fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)
    os.close(folder)


def _rank_label() -> str:
    rank = os.environ.get("RANK", "0")
    return f"rank{rank if rank.isascii() and rank.isdigit() else 0}"


@contextmanager
def _locked_marker(folder: int, path: str) -> Iterator[None]:
    """Hold the lock that claims and clean-ups of all processes share."""
    mark(folder, path)
    try:
        fd = os.open(MARKER, _REGULAR, dir_fd=folder)
    except OSError as error:
        raise refused(error, "Can't open the folder's marker", path) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as error:
            raise refused(error, "The file system can't lock files", path) from error
        try:
            yield
        finally:
            # Not left to close: a child forked meanwhile would keep the lock.
            fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def _remove_leftovers(folder: int, path: str) -> None:
    """Remove spill files whose lock is free: whoever made them is dead."""
    for name in filter(SPILL_NAME.fullmatch, os.listdir(folder)):
        try:
            fd = os.open(name, _REGULAR, dir_fd=folder)
        except OSError:
            continue
        try:
            if stat.S_ISREG(os.fstat(fd).st_mode):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(name, dir_fd=folder)
                log.info("Removed %s/%s, left by a process that died", path, name)
        except BlockingIOError:
            pass
        except OSError as error:
            log.warning("Can't remove the leftover %s/%s: %s", path, name, error)
        finally:
            os.close(fd)


def _create(folder: int, label: str, path: str) -> tuple[str, int]:
    """Make and lock a file under the first free name."""
    flags = _REGULAR | os.O_CREAT | os.O_EXCL
    for number in itertools.count():
        name = f"{label}-{os.getpid()}-{number}.spill"
        try:
            fd = os.open(name, flags, FILE_MODE, dir_fd=folder)
        except FileExistsError:
            continue
        except OSError as error:
            raise refused(error, "Can't make a spill file", os.path.join(path, name)) from error
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.unlink(name, dir_fd=folder)
            os.close(fd)
            raise refused(error, "The file system can't lock files", path) from error
        return name, fd
    raise AssertionError("unreachable")
