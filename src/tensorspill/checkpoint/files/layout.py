"""Where everything goes in one file: order, offsets and the safetensors header."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from json.encoder import encode_basestring_ascii
from typing import NamedTuple

from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.files.dtypes import kept_as, name_of
from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import round_up

__all__ = ["BLOCK", "FileLayout", "Header", "lay_out"]

#: What data is aligned to in the file, where its size allows.
BLOCK = 4096

#: The library refuses longer headers.
LONGEST_HEADER = 100_000_000

_LENGTH_BYTES = 8

#: Most that an entry has beside its name and numbers, and most digits of a number with a comma.
_ENTRY = len('"object:#99999999":{"dtype":"F8_E4M3FNUZ","shape":[],"data_offsets":[]},')
_DIGITS = 20
_METADATA = 200


class FileLayout(NamedTuple):
    """A file to be written.

    Attributes
    ----------
    header_bytes : int
        Room for the header, a multiple of `BLOCK`; where the data begins.
    chunks : list of Chunk
    sizes, offsets : list of int
        Bytes of each chunk, and where it is in the file, ascending.
    objects : list of (ObjectChunk, int)
        With the offset of each; they come last.
    nbytes : int
        Of the file.
    """

    header_bytes: int
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
    ordered, sizes = _ordered(chunks)
    room = _room(ordered, objects)
    ends = list(itertools.accumulate(sizes, initial=room))
    kept = list(itertools.accumulate((len(item.data) for item in objects), initial=ends[-1]))
    return FileLayout(
        room, ordered, sizes, ends[:-1], list(zip(objects, kept[:-1], strict=True)), kept[-1]
    )


def _ordered(chunks: Sequence[Chunk]) -> tuple[list[Chunk], list[int]]:
    for chunk in chunks:
        chunk.check()
    sizes = [chunk.nbytes for chunk in chunks]
    if not any(size % BLOCK for size in sizes):
        return list(chunks), sizes
    pairs = list(zip(chunks, sizes, strict=True))
    rest = [pair for pair in pairs if pair[1] % BLOCK]
    rest.sort(key=lambda pair: -pair[0].tensor.dtype.itemsize)
    pairs = [pair for pair in pairs if pair[1] % BLOCK == 0] + rest
    return [chunk for chunk, _ in pairs], [size for _, size in pairs]


def _room(chunks: Sequence[Chunk], objects: Sequence[ObjectChunk]) -> int:
    """Return bytes that the header can't exceed, so that data can be written before it is made."""
    names = [chunk.name for chunk in chunks] + [item.name for item in objects]
    numbers = 3 * sum(len(chunk.box.offsets) for chunk in chunks) + 3 * len(names)
    keys = sum(map(len, map(encode_basestring_ascii, names)))
    entries = keys + _ENTRY * len(names) + _DIGITS * numbers
    if not all(kept_as(dtype).exact for dtype in {chunk.tensor.dtype for chunk in chunks}):
        # The real dtypes are told in JSON inside of JSON, which may escape each character twice.
        entries *= 3
    room = round_up(_LENGTH_BYTES + _METADATA + entries, BLOCK)
    if room > LONGEST_HEADER:
        raise UnsupportedError(
            f"{len(names)} tensors are too many for one safetensors file",
            remedy="Write them with more writers, or to more files",
        )
    return room


class Header:
    """The header of a file, made in steps beside the transfers: there may be very many entries."""

    def __init__(self, layout: FileLayout) -> None:
        self._layout = layout
        self._rows: list[str] = []
        self._taken = {"__metadata__"}
        self._dtypes: dict[str, str] = {}
        self._next = 0

    def add(self, stop: int) -> None:
        """Make the entries of chunks before `stop`."""
        layout = self._layout
        for number in range(self._next, stop):
            chunk = layout.chunks[number]
            kept, lengths = kept_as(chunk.tensor.dtype), chunk.box.lengths
            key = self._enter(
                _key(chunk),
                kept.name,
                (*lengths, kept.parts) if kept.parts > 1 else lengths,
                layout.offsets[number],
                layout.sizes[number],
            )
            if not kept.exact:
                self._dtypes[key] = name_of(chunk.tensor.dtype)
        self._next = max(self._next, stop)

    def finish(self) -> bytes:
        """Return length and JSON, padded with spaces to the room that there is."""
        layout = self._layout
        self.add(len(layout.chunks))
        for item, offset in layout.objects:
            nbytes = len(item.data)
            self._enter(f"object:{item.name}", "U8", (nbytes,), offset, nbytes)
        # Other libraries ask for "format"; values have to be text.
        metadata = {"format": "pt", "tensorspill": "1"}
        if self._dtypes:
            metadata["dtypes"] = json.dumps(self._dtypes)
        rows = [f'"__metadata__":{json.dumps(metadata)}', *self._rows]
        padded = layout.header_bytes - _LENGTH_BYTES
        text = f"{{{','.join(rows)}}}".encode().ljust(padded)
        if len(text) != padded:
            raise AssertionError("the header is longer than its bound")
        return padded.to_bytes(_LENGTH_BYTES, "little") + text

    def _enter(self, key: str, dtype: str, shape: Sequence[int], offset: int, nbytes: int) -> str:
        """Add an entry; return its key, which differs from all others whatever names look like."""
        found, number = key, 1
        while found in self._taken:
            number += 1
            found = f"{key}#{number}"
        self._taken.add(found)
        begin = offset - self._layout.header_bytes
        sizes = ",".join(map(str, shape))
        self._rows.append(
            f'{encode_basestring_ascii(found)}:{{"dtype":"{dtype}","shape":[{sizes}],'
            f'"data_offsets":[{begin},{begin + nbytes}]}}'
        )
        return found


def _key(chunk: Chunk) -> str:
    """Return the name in the file: the tensor's, and for a part of one which part."""
    offsets, lengths = chunk.box
    if not (chunk.partial or any(offsets)):
        return chunk.name
    ranges = (f"{start}:{start + length}" for start, length in zip(offsets, lengths, strict=True))
    return f"{chunk.name}[{','.join(ranges)}]"
