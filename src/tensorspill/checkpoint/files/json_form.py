"""The body of a manifest as JSON, and back with every value checked."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import TYPE_CHECKING, Any, NoReturn

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.coverage import why_not_covered
from tensorspill.checkpoint.files.dtypes import dtype_of, name_of
from tensorspill.checkpoint.files.names import is_file_name
from tensorspill.checkpoint.files.records import (
    LARGEST_SPAN,
    BoxRecord,
    FileRecord,
    ObjectRecord,
    TensorRecord,
    digest_count,
)
from tensorspill.errors import CorruptError

if TYPE_CHECKING:
    from tensorspill.checkpoint.files.manifest import Manifest

__all__ = ["body_of", "fields_of"]

#: Beyond any file system, and far enough from 2**63 for sums.
_LARGEST = 1 << 60


def body_of(manifest: Manifest) -> str:
    """Return the JSON: lists where there are many, files by their number."""
    numbers = {file.name: number for number, file in enumerate(manifest.files)}
    fields = {
        "step": _dumps(manifest.step),
        "plan_digest": _dumps(manifest.plan_digest),
        "versions": _dumps(dict(manifest.versions)),
        "files": _dumps(
            [
                [file.name, file.nbytes, file.header_bytes, f"{file.header_digest:016x}"]
                for file in manifest.files
            ]
        ),
        "tensors": _tensors_of(manifest.tensors, numbers),
        "objects": _dumps(
            {
                name: [numbers[item.file], item.offset, item.nbytes, f"{item.digest:016x}"]
                for name, item in manifest.objects.items()
            }
        ),
        "key_paths": _dumps(dict(manifest.key_paths)),
    }
    return f"{{{','.join(f'{_dumps(name)}:{text}' for name, text in fields.items())}}}"


def _tensors_of(tensors: Mapping[str, TensorRecord], numbers: Mapping[str, int]) -> str:
    """Return the JSON of all tensors; by hand, since there may be very many."""
    known: dict[tuple[int, ...], str] = {}

    def sizes(of: tuple[int, ...]) -> str:
        # Most tensors of a model have one of a few shapes.
        text = known.get(of)
        if text is None:
            text = known[of] = f"[{','.join(map(str, of))}]"
        return text

    rows = []
    for name, tensor in tensors.items():
        boxes = [
            f"[{sizes(box.box.offsets)},{sizes(box.box.lengths)},{numbers[box.file]},{box.offset},"
            f'{box.span},"{binascii.b2a_base64(box.digests, newline=False).decode()}"]'
            for box in tensor.boxes
        ]
        rows.append(
            f'{encode_basestring_ascii(name)}:["{name_of(tensor.dtype)}",{sizes(tensor.shape)},'
            f"[{','.join(boxes)}]]"
        )
    return f"{{{','.join(rows)}}}"


def _dumps(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def fields_of(body: Any) -> dict[str, Any]:
    """Return the fields of `Manifest` that a body says.

    Raises
    ------
    CorruptError
        A value is missing, of another type, or can't be.
    """
    try:
        return _fields(body)
    except (KeyError, TypeError, ValueError, AttributeError, binascii.Error) as error:
        raise CorruptError(f"The manifest is not what it should be: {error!r}") from error


def _fields(body: Any) -> dict[str, Any]:
    if set(body) != _FIELDS:
        _bad(f"it has {sorted(body)}")
    files = tuple(_file(*row) for row in body["files"])
    if len({file.name for file in files}) < len(files):
        _bad("a file is there twice")
    step = body["step"]
    return {
        "step": None if step is None else _integer(step, -_LARGEST),
        "plan_digest": _text(body["plan_digest"]),
        "versions": {_text(name): _text(text) for name, text in body["versions"].items()},
        "files": files,
        "tensors": {
            _text(name): _tensor(name, files, *row) for name, row in body["tensors"].items()
        },
        "objects": {
            _text(name): _object(name, files, *row) for name, row in body["objects"].items()
        },
        "key_paths": _key_paths(body["key_paths"]),
    }


_FIELDS = {"step", "plan_digest", "versions", "files", "tensors", "objects", "key_paths"}


def _file(name: Any, nbytes: Any, header_bytes: Any, header_digest: Any) -> FileRecord:
    if not is_file_name(name):
        _bad(f"{name!r} is no name of a file in the checkpoint's folder")
    size = _integer(nbytes)
    if _integer(header_bytes) > size:
        _bad(f"the header of {name} is longer than the file")
    return FileRecord(name, size, header_bytes, int(_text(header_digest), 16))


def _tensor(
    name: str, files: tuple[FileRecord, ...], dtype: Any, shape: Any, rows: Any
) -> TensorRecord:
    found = dtype_of(dtype)
    sizes = tuple(map(_integer, shape))
    if math.prod(max(size, 1) for size in sizes) * found.itemsize > _LARGEST:
        _bad(f"tensor {name!r} is larger than anything")
    boxes = tuple(_box(name, files, found.itemsize, *row) for row in rows)
    if why := why_not_covered(sizes, [box.box for box in boxes]):
        _bad(f"tensor {name!r}: {why}")
    return TensorRecord(found, sizes, boxes)


def _box(
    name: str,
    files: tuple[FileRecord, ...],
    itemsize: int,
    offsets: Any,
    lengths: Any,
    number: Any,
    offset: Any,
    span: Any,
    digests: Any,
) -> BoxRecord:
    box = Box(tuple(map(_integer, offsets)), tuple(map(_integer, lengths)))
    nbytes = box.numel * itemsize
    file = _range(name, files, number, offset, nbytes)
    if offset % itemsize:
        _bad(f"tensor {name!r} is not at a multiple of its elements' size")
    found = base64.b64decode(_text(digests), validate=True)
    # A power of two, so that digests are of whole elements.
    if not 16 <= _integer(span) <= LARGEST_SPAN or span & (span - 1):
        _bad(f"tensor {name!r} has digests of {span} bytes each")
    if len(found) != 8 * digest_count(nbytes, span):
        _bad(f"tensor {name!r} has {len(found) // 8} digests for {nbytes} bytes")
    return BoxRecord(box, file.name, offset, nbytes, span, found)


def _object(
    name: str, files: tuple[FileRecord, ...], number: Any, offset: Any, nbytes: Any, digest: Any
) -> ObjectRecord:
    file = _range(name, files, number, offset, nbytes)
    return ObjectRecord(file.name, offset, nbytes, int(_text(digest), 16))


def _range(
    name: str, files: tuple[FileRecord, ...], number: Any, offset: Any, nbytes: Any
) -> FileRecord:
    """Return the file of a range, which must be among its data."""
    if _integer(number) >= len(files):
        _bad(f"{name!r} is in file {number} of {len(files)}")
    file: FileRecord = files[number]
    if not file.header_bytes <= _integer(offset) <= file.nbytes - _integer(nbytes):
        _bad(f"{name!r} is not inside of {file.name}")
    return file


def _key_paths(paths: Mapping[str, Any]) -> dict[str, tuple[str | int, ...]]:
    for path in paths.values():
        if not isinstance(path, list) or not all(type(part) in (str, int) for part in path):
            _bad(f"{path!r} is no path of keys")
    return {_text(name): tuple(path) for name, path in paths.items()}


def _integer(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= _LARGEST:
        _bad(f"{value!r} is no size or offset")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        _bad(f"{value!r} is no text")
    return value


def _bad(what: str) -> NoReturn:
    raise CorruptError(f"The manifest is not what it should be: {what}")
