"""How errors and results travel between ranks: as JSON, so that nothing is unpickled."""

from __future__ import annotations

import json
from typing import Any

from tensorspill import errors
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.dtypes import dtype_of, name_of
from tensorspill.checkpoint.files.records import BoxRecord, FileRecord, ObjectRecord, Written
from tensorspill.errors import BrokenError, SpillError

__all__ = ["decode_error", "decode_written", "encode_error", "encode_written", "from_rank"]

_PLAIN = (str, int, float, bool, type(None))


def from_rank(error: BaseException, rank: int) -> SpillError:
    """Return what to raise everywhere for an error of one rank of the group.

    It is of the same class where that is one of ours, with the rank in its message and in `ranks`.
    """
    if isinstance(error, SpillError) and error.ranks:
        return error
    if isinstance(error, SpillError):
        found = decode_error(encode_error(error))
        found.message = f"Rank {rank}: {error.message}"
    else:
        found = BrokenError(f"Rank {rank}: {type(error).__name__}: {error}")
    found.args = (found.message,)
    found.ranks = (rank,)
    return found


def encode_error(error: SpillError) -> str:
    """Return an error in a form that `decode_error` takes in another process."""
    fields = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in vars(error).items()
        if isinstance(value, (*_PLAIN, tuple)) and name != "message"
    }
    code = getattr(error, "errno", None)
    return json.dumps([type(error).__name__, error.message, fields, code])


def decode_error(text: str) -> SpillError:
    """Return the error that another rank met."""
    name, message, fields, code = json.loads(text)
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, SpillError)):
        kind = SpillError
    made: SpillError = kind(message)
    for field, value in fields.items():
        setattr(made, field, tuple(value) if isinstance(value, list) else value)
    if isinstance(made, BrokenError) and code is not None:
        plain = BrokenError(message, errno=code)
        made.errno, made.strerror, made.filename = code, plain.strerror, made.path
    return made


def encode_written(written: Written) -> bytes:
    """Return what a rank wrote, as a line of JSON and the digests of all chunks behind it."""
    boxes: list[Any] = []
    for name, dtype, box in written.boxes:
        where = (*box.box, box.offset, box.nbytes, box.span, len(box.digests))
        boxes.append((name, name_of(dtype), *where))
    objects = [(n, o.offset, o.nbytes, o.digest) for n, o in written.objects]
    file = written.file
    head = {
        "file": (file.name, file.nbytes, file.header_bytes, file.header_digest),
        "boxes": boxes,
        "objects": objects,
        "seconds": written.seconds,
        "reused": written.reused,
    }
    text = json.dumps(head, separators=(",", ":")).encode()
    return b"".join((text, b"\n", *(box.digests for _, _, box in written.boxes)))


def decode_written(data: bytes) -> Written:
    """Return what `encode_written` was given."""
    text, _, digests = data.partition(b"\n")
    head = json.loads(text)
    file = FileRecord(*head["file"])
    boxes, at = [], 0
    for name, dtype, offsets, lengths, offset, nbytes, span, size in head["boxes"]:
        box = Box(tuple(offsets), tuple(lengths))
        record = BoxRecord(box, file.name, offset, nbytes, span, digests[at : at + size])
        boxes.append((name, dtype_of(dtype), record))
        at += size
    objects = tuple((name, ObjectRecord(file.name, *rest)) for name, *rest in head["objects"])
    return Written(file, tuple(boxes), objects, head["seconds"], head["reused"])
