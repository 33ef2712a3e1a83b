"""Commit: a checkpoint is there whole, or not at all, whatever happens.

While it is saved a checkpoint has a name of its own, with the end ``.saving``. The commit makes
its files' names durable, then its manifest, then gives it its name, makes that durable, and last
lets the file `latest` name it. Whoever is killed in between leaves a folder that is known to be a
leftover, or a checkpoint that is whole and not yet the latest.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import logging
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from tensorspill.checkpoint.files import recycling
from tensorspill.checkpoint.files.durable import sync_fd, write_text
from tensorspill.checkpoint.files.manifest import Manifest
from tensorspill.checkpoint.files.names import (
    LATEST,
    MANIFEST,
    REMOVED,
    SAVING,
    is_checkpoint_name,
)
from tensorspill.checkpoint.files.root import DIRECTORY, Root
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.errors import (
    BrokenError,
    ClosedError,
    CorruptError,
    MissingFileError,
    SpillError,
    UnsupportedError,
)

__all__ = ["Pending", "begin", "latest", "prune", "sweep"]

log = logging.getLogger(__name__)

_RENAME_EXCHANGE = 2


class Pending:
    """A checkpoint that is being saved; made by `begin`, in one process of the job.

    It holds the lock of the root: no other job can save there meanwhile.

    Attributes
    ----------
    root, name : str
        The folder of all checkpoints, and what this one will be called there.
    folder : str
        Where its files go, by `write_file`, from any process.
    renamed : bool
        Whether `commit` came as far as the rename: if it fails after that, the outcome is unknown
        until `latest` tells.
    """

    def __init__(self, root: Root, name: str, replace: bool) -> None:
        self.root = root.path
        self.name = name
        self.folder = os.path.join(root.path, name + SAVING)
        self.renamed = False
        self._root = root
        self._replace = replace
        self._close = weakref.finalize(self, root.close)
        self._close.atexit = False

    @property
    def closed(self) -> bool:
        """Whether it was committed or abandoned."""
        return not self._close.alive

    def commit(self, manifest: Manifest, keep: int | None = None) -> str:
        """Make the checkpoint the latest one; durable when this returns.

        Parameters
        ----------
        manifest : Manifest
            Of the files in `folder`.
        keep : int, optional
            How many checkpoints to keep, this one included; older ones are removed once this one
            is committed.

        Returns
        -------
        str
            Path of the checkpoint.

        Raises
        ------
        BrokenError
            What went wrong. If not `renamed`, nothing was committed.
        UnsupportedError
            A file of the manifest is missing or has another length, or `keep` is less than 1.
        ClosedError
            It was committed or abandoned before, or belongs to the parent process.
        """
        if self.closed:
            raise ClosedError("The checkpoint was committed or abandoned", path=self.folder)
        if self._root.forked:
            raise ClosedError("The checkpoint belongs to the parent process", path=self.folder)
        _check_keep(keep)
        root, saving = self._root, self.name + SAVING
        known = root.checkpoints()
        sequence = 1 + max((each.sequence for each in known), default=0)
        manifest = dataclasses.replace(manifest, sequence=sequence)
        folder = _open(root, saving)
        try:
            _check_files(folder, manifest, self.folder)
            root.return_lent(saving)
            # The names of the files first, so that the manifest never names what is not there.
            sync_fd(folder, self.folder)
            write_text(folder, MANIFEST, manifest.to_json().encode(), self.folder)
        finally:
            os.close(folder)
        with HeldInterrupts():
            self._rename(saving)
            self.renamed = True
            sync_fd(root.fd, root.path)
            write_text(root.fd, LATEST, f"{self.name}\n".encode(), root.path)
        self._tidy(saving, keep, manifest.nbytes)
        self._close()
        return os.path.join(root.path, self.name)

    def _rename(self, saving: str) -> None:
        if self._replace and self._root.exists(self.name):
            _exchange(self._root, saving, self.name)
        else:
            self._root.rename(saving, self.name)

    def _tidy(self, saving: str, keep: int | None, nbytes: int) -> None:
        """Remove what is not needed any more; the checkpoint is safe whatever comes of that."""
        root = self._root
        try:
            if root.exists(saving):
                # What was exchanged for the new one.
                root.remove(saving, recycle=True)
            if keep is not None:
                _prune(root, keep, self.name)
            root.trim(nbytes)
            sync_fd(root.fd, root.path)
        except SpillError as error:
            log.warning("The checkpoint is committed, but not all old ones are removed: %s", error)

    def abandon(self) -> None:
        """Remove what was written and let go of the lock; a second time does no harm.

        What can't be removed is left for the next `begin`. In a forked child nothing is removed.
        """
        if self.closed:
            return
        try:
            if not (self.renamed or self._root.forked) and self._root.exists(self.name + SAVING):
                self._root.remove(self.name + SAVING)
        except SpillError as error:
            log.warning("Left for the next save to remove: %s", error)
        finally:
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.abandon()


def begin(root: str | os.PathLike[str], name: str, *, replace: bool = False) -> Pending:
    """Begin to save a checkpoint, after removing what failed saves left.

    Parameters
    ----------
    root : str or path
        Folder of the job's checkpoints; made if missing.
    name : str
        Of the checkpoint: a folder name of letters, digits, ``_``, ``-`` and ``.``.
    replace : bool
        Whether a checkpoint of that name may be there; the commit exchanges the two in one step.

    Raises
    ------
    BusyError
        Another job is saving to the same root.
    UnsupportedError
        The name is not allowed, or taken.
    BrokenError
        The operating system refused.
    """
    if not is_checkpoint_name(name):
        raise UnsupportedError(f"{name!r} is no name for a checkpoint", path=root)
    place = Root(root, make=True)
    try:
        place.lock()
        _sweep(place)
        taken = place.exists(name)
        if taken and not (replace and any(each.name == name for each in place.checkpoints())):
            raise UnsupportedError(
                "There is something of that name already",
                path=os.path.join(place.path, name),
                remedy="Choose another name, or say that it may be replaced",
            )
        place.make(name + SAVING)
        _lend_recycled(place, name + SAVING)
        sync_fd(place.fd, place.path)
    except BaseException:
        place.close()
        raise
    return Pending(place, name, replace)


def latest(root: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest committed checkpoint, or None if there never was one.

    Reads only; nothing is removed or repaired.

    Raises
    ------
    CorruptError
        The file `latest` names no checkpoint's name.
    MissingFileError
        The checkpoint that it names is gone.
    """
    try:
        place = Root(root)
    except MissingFileError:
        return None
    try:
        name = _latest_name(place)
        if name is None:
            return None
        if not any(each.name == name for each in place.checkpoints()):
            raise MissingFileError(
                "The latest checkpoint is gone, or its manifest is",
                errno=errno.ENOENT,
                path=os.path.join(place.path, name),
                remedy="Load one of the others by its path",
            )
        return os.path.join(place.path, name)
    finally:
        place.close()


def prune(root: str | os.PathLike[str], keep: int) -> tuple[str, ...]:
    """Remove all but the newest `keep` checkpoints; return the names of those removed.

    The latest one is never removed, nor one with files that we did not put there.

    Raises
    ------
    BusyError
        Another job is saving to the same root.
    UnsupportedError
        `keep` is less than 1.
    """
    _check_keep(keep)
    with _locked(root) as place:
        return _prune(place, keep, _latest_name(place))


def sweep(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Remove what failed saves left, as `begin` does; return the names of what was removed.

    Raises
    ------
    BusyError
        Another job is saving to the same root.
    """
    with _locked(root) as place:
        return _sweep(place)


@contextmanager
def _locked(root: str | os.PathLike[str]) -> Iterator[Root]:
    place = Root(root)
    try:
        place.lock()
        yield place
    finally:
        place.close()


def _latest_name(place: Root) -> str | None:
    path = os.path.join(place.path, LATEST)
    try:
        fd = os.open(LATEST, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't read the file", path=path) from error
    with os.fdopen(fd, "rb") as file:
        name = file.read(1000).decode("ascii", "replace").removesuffix("\n")
    if not is_checkpoint_name(name):
        raise CorruptError(f"It names {name!r}, which is no checkpoint's name", path=path)
    return name


def _check_keep(keep: int | None) -> None:
    if keep is not None and keep < 1:
        raise UnsupportedError(f"At least one checkpoint has to be kept, not {keep}")


def _prune(place: Root, keep: int, newest: str | None) -> tuple[str, ...]:
    removed = []
    others = [each.name for each in place.checkpoints() if each.name != newest]
    for name in others[keep - 1 if newest is not None else keep :]:
        if not place.removable(name):
            continue
        # In one step, so that nobody finds half of it; what is left of that is a leftover.
        place.rename(name, name + REMOVED)
        place.remove(name + REMOVED, recycle=True)
        removed.append(name)
    return tuple(removed)


def _sweep(place: Root) -> tuple[str, ...]:
    removed = []
    for name in place.leftovers():
        if place.remove(name):
            log.info("Removed %s/%s, left by a save that failed", place.path, name)
            removed.append(name)
    return tuple(removed)


def _lend_recycled(place: Root, saving: str) -> None:
    """Put the recycled files where all writers of the new checkpoint find them."""
    if place.exists(recycling.IN_ROOT):
        place.rename(recycling.IN_ROOT, os.path.join(saving, recycling.IN_PENDING))


def _open(place: Root, name: str) -> int:
    try:
        return os.open(name, DIRECTORY, dir_fd=place.fd)
    except OSError as error:
        path = os.path.join(place.path, name)
        raise BrokenError.from_oserror(error, "Can't open the folder", path=path) from error


def _check_files(folder: int, manifest: Manifest, path: str) -> None:
    for file in manifest.files:
        where = os.path.join(path, file.name)
        try:
            found = os.stat(file.name, dir_fd=folder, follow_symlinks=False).st_size
        except OSError as error:
            raise BrokenError.from_oserror(error, "A file is missing", path=where) from error
        if found != file.nbytes:
            raise UnsupportedError(
                f"A file of the checkpoint has {found} bytes", path=where, nbytes=file.nbytes
            )


def _exchange(place: Root, old: str, new: str) -> None:
    """Exchange two names in one step."""
    libc = ctypes.CDLL(None, use_errno=True)
    path = os.path.join(place.path, new)
    try:
        renameat2 = libc.renameat2
    except AttributeError:
        raise UnsupportedError("The C library can't exchange two names", path=path) from None
    if renameat2(place.fd, old.encode(), place.fd, new.encode(), _RENAME_EXCHANGE) != 0:
        raise BrokenError.from_errno(
            ctypes.get_errno(),
            "The file system can't exchange two names",
            path=path,
            remedy="Save under another name",
        )
