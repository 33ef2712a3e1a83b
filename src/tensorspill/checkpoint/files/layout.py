"""Where everything goes in one file: order, offsets and the safetensors header."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.files.dtypes import kept_as, name_of
from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import round_up

__all__ = ["BLOCK", "FileLayout", "lay_out"]

#: What data is aligned to in the file, where its size allows.
BLOCK = 4096

#: The library refuses longer headers.
LONGEST_HEADER = 100_000_000

_LENGTH_BYTES = 8


class FileLayout(NamedTuple):
    """A file to be written.

    Attributes
    ----------
    header : bytes
        Everything before the data, a multiple of `BLOCK`.
    chunks : list of (Chunk, int)
        With the offset of each in the file, ascending.
    objects : list of (ObjectChunk, int)
        The same; they come last.
    nbytes : int
        Of the file.
    """

    header: bytes
    chunks: list[tuple[Chunk, int]]
    objects: list[tuple[ObjectChunk, int]]
    nbytes: int


def lay_out(chunks: Sequence[Chunk], objects: Sequence[ObjectChunk]) -> FileLayout:
    """Order the content of a file.

    Chunks of whole blocks come first, so that all of them begin at a block; then the others, those
    of wide elements first, so that every element lies at a multiple of its size; then the objects.

    Raises
    ------
    UnsupportedError
        A chunk is not what it says it is, or there are too many for one header.
    """
    for chunk in chunks:
        chunk.check()
    whole = [chunk for chunk in chunks if chunk.nbytes % BLOCK == 0]
    rest = [chunk for chunk in chunks if chunk.nbytes % BLOCK]
    rest.sort(key=lambda chunk: -chunk.tensor.dtype.itemsize)
    entries: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    placed: list[tuple[Chunk, int]] = []
    end = 0
    for chunk in (*whole, *rest):
        placed.append((chunk, end))
        kept = kept_as(chunk.tensor.dtype)
        key = _free(entries, _key(chunk))
        shape = list(chunk.box.lengths) + ([kept.parts] if kept.parts > 1 else [])
        entries[key] = _entry(kept.name, shape, end, chunk.nbytes)
        if not kept.exact:
            dtypes[key] = name_of(chunk.tensor.dtype)
        end += chunk.nbytes
    kept_objects: list[tuple[ObjectChunk, int]] = []
    for item in objects:
        nbytes = len(item.data)
        entries[_free(entries, f"object:{item.name}")] = _entry("U8", [nbytes], end, nbytes)
        kept_objects.append((item, end))
        end += nbytes
    header = _header(entries, dtypes)
    start = len(header)
    return FileLayout(
        header,
        [(chunk, start + offset) for chunk, offset in placed],
        [(item, start + offset) for item, offset in kept_objects],
        start + end,
    )


def _entry(dtype: str, shape: list[int], start: int, nbytes: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, start + nbytes]}


def _key(chunk: Chunk) -> str:
    """Return the name in the file: the tensor's, and for a part of one which part."""
    offsets, lengths = chunk.box
    if not any(offsets) and not chunk.partial:
        return chunk.name
    ranges = (f"{start}:{start + length}" for start, length in zip(offsets, lengths, strict=True))
    return f"{chunk.name}[{','.join(ranges)}]"


def _free(taken: dict[str, Any], key: str) -> str:
    """Return a key that is not taken; names of tensors may look like anything."""
    found, number = key, 1
    while found in taken or found == "__metadata__":
        number += 1
        found = f"{key}#{number}"
    return found


def _header(entries: dict[str, Any], dtypes: dict[str, str]) -> bytes:
    """Return length and JSON, padded with spaces to whole blocks."""
    # Other libraries ask for "format"; values have to be text.
    metadata = {"format": "pt", "tensorspill": "1"}
    if dtypes:
        metadata["dtypes"] = json.dumps(dtypes)
    text = json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode()
    padded = round_up(_LENGTH_BYTES + len(text), BLOCK) - _LENGTH_BYTES
    if padded > LONGEST_HEADER:
        raise UnsupportedError(
            f"{len(entries)} tensors are too many for one safetensors file",
            remedy="Write them with more writers, or to more files",
        )
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)
