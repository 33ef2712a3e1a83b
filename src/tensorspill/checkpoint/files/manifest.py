"""The manifest: which tensors, objects and files make a checkpoint, as one file of JSON.

The file has three lines. The first is the start of an object, with the format's name, the number of
the checkpoint in its folder, and the SHA-256 of number and second line; the second is the manifest
itself; the third ends the object. So the whole is JSON, and what was changed by hand is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tensorspill.checkpoint.files.records import FileRecord, ObjectRecord, TensorRecord, Written

__all__ = ["MANIFEST", "KeyPath", "Manifest", "assemble"]

#: Name of the file in a checkpoint's folder.
MANIFEST = "manifest.json"

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes
    ----------
    step : int or None
        Of the training, if it was told.
    tensors : mapping of str to TensorRecord
    objects : mapping of str to ObjectRecord
    files : tuple of FileRecord
    plan_digest : str
        Of the plan by which it was written; empty without one.
    key_paths : mapping of str to tuple of str or int
        Where each name is in the nested state dictionary, if names were made from one.
    versions : mapping of str to str
        Of the libraries that wrote it.
    sequence : int
        Its number among the checkpoints of its folder; given by the commit.
    """

    step: int | None
    tensors: Mapping[str, TensorRecord]
    objects: Mapping[str, ObjectRecord]
    files: tuple[FileRecord, ...]
    plan_digest: str = ""
    key_paths: Mapping[str, KeyPath] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    sequence: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all files."""
        return sum(file.nbytes for file in self.files)

    def to_json(self) -> str:
        """Return the text of the file."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, text: str | bytes, path: str | None = None) -> Manifest:
        """Return the manifest that a file says.

        Raises
        ------
        CorruptError
            It is cut off, was changed since it was written, or says what can't be: names that
            leave the folder, parts that overlap, are missing or lie outside of a file.
        """
        raise NotImplementedError


def assemble(
    written: Iterable[Written],
    shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]],
    *,
    step: int | None = None,
    plan_digest: str = "",
    key_paths: Mapping[str, KeyPath] | None = None,
) -> Manifest:
    """Make the manifest of what several writers wrote.

    Parameters
    ----------
    written : iterable of Written
        From all writers, in any order.
    shapes : mapping of str to (torch.dtype, tuple of int)
        Every tensor of the checkpoint, whole.
    step, plan_digest, key_paths
        See `Manifest`.

    Raises
    ------
    UnsupportedError
        The parts of a tensor do not cover it, each element once; or a file or object is there
        twice.
    """
    raise NotImplementedError
