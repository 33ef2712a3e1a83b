"""The header of a safetensors file: an entry for each chunk and object."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Sequence
from json.encoder import encode_basestring_ascii

from tensorspill.checkpoint.files.chunks import Box, Chunk, ObjectChunk
from tensorspill.checkpoint.files.dtypes import kept_as, name_of
from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import round_up

__all__ = ["BLOCK", "Entries", "header_of", "room_for"]

#: What data is aligned to in the file, where its size allows.
BLOCK = 4096

#: The library refuses longer headers.
LONGEST_HEADER = 100_000_000

_LENGTH_BYTES = 8

#: Most that an entry has beside its name and numbers, and most digits of a number with a comma.
_ENTRY = len('"object:#99999999":{"dtype":"F8_E4M3FNUZ","shape":[],"data_offsets":[]},')
_DIGITS = 20
_METADATA_ROOM = 200

_METADATA = "__metadata__"


def room_for(chunks: Sequence[Chunk], objects: Iterable[str]) -> int:
    """Return bytes that a header can't exceed, so that data can be written before it is made.

    Parameters
    ----------
    chunks : sequence of Chunk
    objects : iterable of str
        Names of the objects.

    Raises
    ------
    UnsupportedError
        There are too many for one header.
    """
    names = [chunk.name for chunk in chunks] + list(objects)
    numbers = 3 * sum(len(chunk.box.offsets) for chunk in chunks) + 3 * len(names)
    keys = sum(map(len, map(encode_basestring_ascii, names)))
    entries = keys + _ENTRY * len(names) + _DIGITS * numbers
    if not all(kept_as(dtype).exact for dtype in {chunk.tensor.dtype for chunk in chunks}):
        # The real dtypes are told in JSON inside of JSON, which may escape each character twice.
        entries *= 3
    room = round_up(_LENGTH_BYTES + _METADATA_ROOM + entries, BLOCK)
    if room > LONGEST_HEADER:
        raise UnsupportedError(
            f"{len(names)} tensors are too many for one safetensors file",
            remedy="Write them with more writers, or to more files",
        )
    return room


class Entries:
    """The entries of a file's chunks, made in steps beside the transfers: there may be very many.

    Parameters
    ----------
    begin : int
        Where data begins in the file.

    Attributes
    ----------
    rows : dict of str to str
        JSON by its key, for each chunk so far.
    dtypes : dict of str to str
        The real dtype of those that are kept as another one.
    """

    def __init__(self, begin: int) -> None:
        self.rows: dict[str, str] = {}
        self.dtypes: dict[str, str] = {}
        self._begin = begin

    def add(
        self, chunks: Sequence[Chunk], offsets: Sequence[int], sizes: Sequence[int], stop: int
    ) -> None:
        """Make the entries of chunks before `stop`, as far as they aren't there."""
        for number in range(len(self.rows), stop):
            chunk = chunks[number]
            kept, lengths = kept_as(chunk.tensor.dtype), chunk.box.lengths
            shape = (*lengths, kept.parts) if kept.parts > 1 else lengths
            start = offsets[number] - self._begin
            key = _free(_key(chunk.name, chunk.box, chunk.partial), self.rows)
            if not kept.exact:
                self.dtypes[key] = name_of(chunk.tensor.dtype)
            # Last and in one step: whoever interrupts this, a later save goes on with it.
            self.rows[key] = _row(key, kept.name, shape, start, start + sizes[number])


def header_of(entries: Entries, objects: Iterable[tuple[ObjectChunk, int]], nbytes: int) -> bytes:
    """Return length and JSON, padded with spaces to the room that there is.

    Parameters
    ----------
    entries : Entries
        Of all chunks.
    objects : iterable of (ObjectChunk, int)
        With the offset of each in the file.
    nbytes : int
        The room: where data begins in the file.
    """
    rows = dict(entries.rows)
    for item, offset in objects:
        key, start, length = _free(f"object:{item.name}", rows), offset - nbytes, len(item.data)
        rows[key] = _row(key, "U8", (length,), start, start + length)
    # Other libraries ask for "format"; values have to be text.
    metadata = {"format": "pt", "tensorspill": "1"}
    if entries.dtypes:
        metadata["dtypes"] = json.dumps(entries.dtypes)
    padded = nbytes - _LENGTH_BYTES
    whole = ",".join([f'"{_METADATA}":{json.dumps(metadata)}', *rows.values()])
    text = f"{{{whole}}}".encode().ljust(padded)
    if len(text) != padded:
        raise AssertionError("the header is longer than its bound")
    return padded.to_bytes(_LENGTH_BYTES, "little") + text


def _row(key: str, dtype: str, shape: Sequence[int], start: int, stop: int) -> str:
    sizes = ",".join(map(str, shape))
    return (
        f'{encode_basestring_ascii(key)}:{{"dtype":"{dtype}","shape":[{sizes}],'
        f'"data_offsets":[{start},{stop}]}}'
    )


def _free(key: str, taken: Container[str]) -> str:
    """Return a key that differs from all others, whatever names look like."""
    found, number = key, 1
    while found in taken or found == _METADATA:
        number += 1
        found = f"{key}#{number}"
    return found


def _key(name: str, box: Box, partial: bool) -> str:
    """Return the name in the file: the tensor's, and for a part of one which part."""
    offsets, lengths = box
    if not (partial or any(offsets)):
        return name
    ranges = (f"{start}:{start + length}" for start, length in zip(offsets, lengths, strict=True))
    return f"{name}[{','.join(ranges)}]"
