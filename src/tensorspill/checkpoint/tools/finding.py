"""Which checkpoint a path means: itself, or the latest one in it."""

from __future__ import annotations

import os

from tensorspill.checkpoint.files.commit import latest
from tensorspill.checkpoint.files.names import MANIFEST
from tensorspill.errors import MissingFileError

__all__ = ["checkpoint_at"]


def checkpoint_at(path: str | os.PathLike[str]) -> str:
    """Return the folder of a checkpoint.

    Parameters
    ----------
    path : str or path
        Of a checkpoint, or of a folder of checkpoints, of which the latest is taken.

    Raises
    ------
    MissingFileError
        There is none.
    CorruptError
        See `tensorspill.checkpoint.files.commit.latest`.
    """
    where = os.path.abspath(os.fspath(path))
    if os.path.lexists(os.path.join(where, MANIFEST)):
        return where
    found = latest(where)
    if found is None:
        raise MissingFileError(
            "There is no committed checkpoint",
            path=where,
            remedy="Name a checkpoint, or the folder that it was saved to",
        )
    return found
