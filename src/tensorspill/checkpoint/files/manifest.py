"""The manifest: which tensors, objects and files make a checkpoint, as one file of JSON.

The file has three lines. The first begins an object, with the format's name, the number of the
checkpoint in its folder, and the SHA-256 of that number and the second line; the second line is the
manifest itself; the third ends the object. So the whole is JSON, the number can be had without
reading the rest, and what was cut off or changed by hand is found.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch

from tensorspill.checkpoint.files.coverage import why_not_covered
from tensorspill.checkpoint.files.json_form import body_of, fields_of
from tensorspill.checkpoint.files.names import MANIFEST
from tensorspill.checkpoint.files.quiet import collection_paused
from tensorspill.checkpoint.files.records import (
    BoxRecord,
    FileRecord,
    ObjectRecord,
    TensorRecord,
    Written,
)
from tensorspill.errors import CorruptError, UnsupportedError

__all__ = ["FIRST_LINE", "MANIFEST", "KeyPath", "Manifest", "assemble"]

KeyPath = tuple[str | int, ...]

#: The first line of the file: the number of the checkpoint, and the digest.
FIRST_LINE = re.compile(
    rb'\{"format":"tensorspill checkpoint 1","sequence":(\d{1,18}),'
    rb'"sha256":"([0-9a-f]{64})","manifest":\n'
)


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
        with collection_paused():
            body = body_of(self)
        return (
            f'{{"format":"tensorspill checkpoint 1","sequence":{self.sequence},'
            f'"sha256":"{_sha256(self.sequence, body.encode())}","manifest":\n{body}\n}}\n'
        )

    @classmethod
    def from_json(cls, text: str | bytes, path: str | None = None) -> Manifest:
        """Return the manifest that a file says.

        Parameters
        ----------
        text : str or bytes
        path : str, optional
            Of the file, for errors.

        Raises
        ------
        CorruptError
            It is cut off, was changed since it was written, or says what can't be: names that
            leave the folder, parts that overlap, are missing or lie outside of a file.
        """
        data = text.encode() if isinstance(text, str) else text
        try:
            first = FIRST_LINE.match(data)
            if first is None:
                raise CorruptError("This is no manifest of a checkpoint, or of a later version")
            body = data[first.end() : -3]
            sequence = int(first[1])
            if data[-3:] != b"\n}\n" or _sha256(sequence, body) != first[2].decode():
                raise CorruptError("The manifest was cut off or changed since it was written")
            with collection_paused():
                try:
                    found = json.loads(body)
                except (ValueError, RecursionError) as error:
                    raise CorruptError(f"The manifest is no JSON: {error}") from error
                return cls(**fields_of(found), sequence=sequence)
        except CorruptError as error:
            error.path = path
            raise


def _sha256(sequence: int, body: bytes) -> str:
    return hashlib.sha256(b"%d\n%b" % (sequence, body)).hexdigest()


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
        The parts of a tensor do not cover it, each element once; a part has another dtype; or a
        file or object is there twice.
    """
    with collection_paused():
        tensors, objects, files = _joined(list(written), shapes)
    return Manifest(
        step=step,
        tensors=tensors,
        objects=objects,
        files=tuple(files),
        plan_digest=plan_digest,
        key_paths=dict(key_paths or {}),
        versions=_versions(),
    )


def _joined(
    written: list[Written], shapes: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[dict[str, TensorRecord], dict[str, ObjectRecord], list[FileRecord]]:
    parts: dict[str, list[BoxRecord]] = {name: [] for name in shapes}
    objects: dict[str, ObjectRecord] = {}
    files: dict[str, FileRecord] = {}
    for each in written:
        if files.setdefault(each.file.name, each.file) is not each.file:
            raise UnsupportedError(f"File {each.file.name} was written twice")
        for name, dtype, box in each.boxes:
            known = parts.get(name)
            if known is None or shapes[name][0] is not dtype:
                raise UnsupportedError(f"Tensor {name!r} of {dtype} was written and not planned")
            known.append(box)
        for name, item in each.objects:
            if objects.setdefault(name, item) is not item:
                raise UnsupportedError(f"Object {name!r} was written twice")
    tensors = {}
    for name, (dtype, shape) in shapes.items():
        boxes = parts[name]
        if why := why_not_covered(shape, [box.box for box in boxes]):
            raise UnsupportedError(f"Tensor {name!r} was not written as planned: {why}")
        tensors[name] = TensorRecord(dtype, tuple(shape), tuple(boxes))
    return tensors, objects, list(files.values())


def _versions() -> dict[str, str]:
    # Not imported: the package itself stands on this.
    ours = sys.modules["tensorspill"].__version__
    return {"tensorspill": ours, "torch": str(torch.__version__)}
