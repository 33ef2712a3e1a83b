"""The checkpoints of a folder, and what is in one."""

from __future__ import annotations

import os
from dataclasses import dataclass

from tensorspill.checkpoint.files.commit import latest
from tensorspill.checkpoint.files.manifest import Manifest
from tensorspill.checkpoint.files.opened import read_manifest
from tensorspill.checkpoint.files.root import Root
from tensorspill.errors import SpillError

__all__ = ["Entry", "Listing", "list_checkpoints"]


@dataclass(frozen=True, slots=True)
class Entry:
    """A committed checkpoint.

    Attributes
    ----------
    name : str
    sequence : int
        Its number: the larger, the newer.
    step : int or None
    tensors, objects, files, nbytes : int
        How many; 0 if the manifest is not what it should be.
    latest : bool
    problem : str or None
        What is wrong with the manifest.
    """

    name: str
    sequence: int
    step: int | None
    tensors: int
    objects: int
    files: int
    nbytes: int
    latest: bool
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class Listing:
    """What is in a folder of checkpoints.

    Attributes
    ----------
    root : str
    checkpoints : tuple of Entry
        The newest first.
    leftovers : tuple of str
        Folders that failed saves left, or one that is under way.
    problem : str or None
        What is wrong with the name of the latest one.
    """

    root: str
    checkpoints: tuple[Entry, ...]
    leftovers: tuple[str, ...]
    problem: str | None


def list_checkpoints(root: str | os.PathLike[str]) -> Listing:
    """List a folder of checkpoints; nothing is changed.

    Raises
    ------
    MissingFileError, UnsupportedError, BrokenError
        It can't be read.
    """
    place, problem, newest = Root(root), None, None
    try:
        known, leftovers = place.checkpoints(), place.leftovers()
        try:
            newest = latest(root)
        except SpillError as error:
            problem = str(error)
        entries = [_entry(place.path, each.name, each.sequence, newest) for each in known]
    finally:
        place.close()
    return Listing(place.path, tuple(entries), tuple(leftovers), problem)


def _entry(root: str, name: str, sequence: int, newest: str | None) -> Entry:
    path = os.path.join(root, name)
    manifest, problem = Manifest(None, {}, {}, ()), None
    try:
        manifest = read_manifest(path)
    except SpillError as error:
        problem = str(error)
    return Entry(
        name,
        sequence,
        manifest.step,
        len(manifest.tensors),
        len(manifest.objects),
        len(manifest.files),
        manifest.nbytes,
        path == newest,
        problem,
    )
