"""Where everything goes in one file: order, offsets and the safetensors header."""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Mapping, Sequence
from typing import NamedTuple

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
    chunks : list of Chunk
    sizes, offsets : list of int
        Bytes of each chunk, and where it is in the file, ascending.
    objects : list of (ObjectChunk, int)
        With the offset of each; they come last.
    nbytes : int
        Of the file.
    """

    header: bytes
    chunks: list[Chunk]
    sizes: list[int]
    offsets: list[int]
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
    ordered = _ordered(chunks)
    sizes = [chunk.nbytes for chunk in ordered]
    ends = list(itertools.accumulate(sizes, initial=0))
    entries: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for chunk, begin, end in zip(ordered, ends, ends[1:], strict=False):
        kept = kept_as(chunk.tensor.dtype)
        key = _free(entries, _key(chunk))
        shape = (*chunk.box.lengths, kept.parts) if kept.parts > 1 else chunk.box.lengths
        entries[key] = _entry(kept.name, shape, begin, end)
        if not kept.exact:
            dtypes[key] = name_of(chunk.tensor.dtype)
    end = ends[-1]
    placed: list[tuple[ObjectChunk, int]] = []
    for item in objects:
        nbytes = len(item.data)
        key = _free(entries, f"object:{item.name}")
        entries[key] = _entry("U8", (nbytes,), end, end + nbytes)
        placed.append((item, end))
        end += nbytes
    header = _header(entries, dtypes)
    start = len(header)
    return FileLayout(
        header,
        ordered,
        sizes,
        [start + offset for offset in ends[:-1]],
        [(item, start + offset) for item, offset in placed],
        start + end,
    )


def _ordered(chunks: Sequence[Chunk]) -> list[Chunk]:
    for chunk in chunks:
        chunk.check()
    whole = [chunk for chunk in chunks if chunk.nbytes % BLOCK == 0]
    if len(whole) == len(chunks):
        return whole
    rest = [chunk for chunk in chunks if chunk.nbytes % BLOCK]
    rest.sort(key=lambda chunk: -chunk.tensor.dtype.itemsize)
    return whole + rest


def _entry(dtype: str, shape: Sequence[int], begin: int, end: int) -> str:
    """Return the JSON of an entry; as text, since there may be very many."""
    sizes = ",".join(map(str, shape))
    return f'{{"dtype":"{dtype}","shape":[{sizes}],"data_offsets":[{begin},{end}]}}'


def _key(chunk: Chunk) -> str:
    """Return the name in the file: the tensor's, and for a part of one which part."""
    offsets, lengths = chunk.box
    if not any(offsets) and not chunk.partial:
        return chunk.name
    ranges = (f"{start}:{start + length}" for start, length in zip(offsets, lengths, strict=True))
    return f"{chunk.name}[{','.join(ranges)}]"


def _free(taken: Container[str], key: str) -> str:
    """Return a key that is not taken; names of tensors may look like anything."""
    found, number = key, 1
    while found in taken or found == "__metadata__":
        number += 1
        found = f"{key}#{number}"
    return found


def _header(entries: Mapping[str, str], dtypes: dict[str, str]) -> bytes:
    """Return length and JSON, padded with spaces to whole blocks."""
    # Other libraries ask for "format"; values have to be text.
    metadata = {"format": "pt", "tensorspill": "1"}
    if dtypes:
        metadata["dtypes"] = json.dumps(dtypes)
    rows = [f'"__metadata__":{json.dumps(metadata)}']
    rows += [f"{json.dumps(key)}:{entry}" for key, entry in entries.items()]
    text = f"{{{','.join(rows)}}}".encode()
    padded = round_up(_LENGTH_BYTES + len(text), BLOCK) - _LENGTH_BYTES
    if padded > LONGEST_HEADER:
        raise UnsupportedError(
            f"{len(entries)} tensors are too many for one safetensors file",
            remedy="Write them with more writers, or to more files",
        )
    return padded.to_bytes(_LENGTH_BYTES, "little") + text.ljust(padded)
