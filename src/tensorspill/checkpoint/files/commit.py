"""Commit: a checkpoint is there whole, or not at all, whatever happens."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Self

from tensorspill.checkpoint.files.manifest import Manifest

__all__ = ["Pending", "begin", "latest", "prune", "sweep"]


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

    root: str
    name: str
    folder: str
    renamed: bool

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
            A file of the manifest is missing or has another length.
        """
        raise NotImplementedError

    def abandon(self) -> None:
        """Remove what was written and let go of the lock; a second time does no harm."""

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
        Whether a checkpoint of that name may be there; the commit exchanges the two.

    Raises
    ------
    BusyError
        Another job is saving to the same root.
    UnsupportedError
        The name is not allowed, or taken.
    BrokenError
        The operating system refused.
    """
    raise NotImplementedError


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
    raise NotImplementedError


def prune(root: str | os.PathLike[str], keep: int) -> tuple[str, ...]:
    """Remove all but the newest `keep` checkpoints; return the names of those removed.

    The latest one is never removed.

    Raises
    ------
    BusyError
        Another job is saving to the same root.
    """
    raise NotImplementedError


def sweep(root: str | os.PathLike[str]) -> tuple[str, ...]:
    """Remove what failed saves left, as `begin` does; return the names of what was removed.

    Raises
    ------
    BusyError
        Another job is saving to the same root.
    """
    raise NotImplementedError
