"""Where everything goes in one file: order and offsets.

That follows from names, boxes and types alone, so it is kept from one save of a state to the next.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.files.header import BLOCK, Entries, header_of, room_for

__all__ = ["BLOCK", "FileLayout", "Layouts", "lay_out"]

#: Files of a save are few: one, or one for what is staged and one for what is not.
_KEPT = 4


class _Arrangement(NamedTuple):
    """What is the same for chunks and objects of the same names, boxes and types.

    Attributes
    ----------
    kinds : tuple
        Which these are.
    order : list of int or None
        The number of each chunk as it was given, in the order of the file; None if that is equal.
    sizes, offsets : list of int
        Bytes of each chunk in the order of the file, and where it is there, ascending.
    header_bytes, stop : int
        Where chunks begin and end in the file.
    entries : Entries
        Of the header; there may be less of them than chunks as yet.
    """

    kinds: Any
    order: list[int] | None
    sizes: list[int]
    offsets: list[int]
    header_bytes: int
    stop: int
    entries: Entries


class Layouts:
    """The last few arrangements; for one thread at a time."""

    def __init__(self) -> None:
        self._known: deque[_Arrangement] = deque(maxlen=_KEPT)

    def find(self, kinds: Any) -> _Arrangement | None:
        """Return that of chunks and objects of the same kinds, if there was one."""
        return next((known for known in self._known if known.kinds == kinds), None)

    def keep(self, arrangement: _Arrangement) -> None:
        """Remember one."""
        self._known.append(arrangement)


class FileLayout(NamedTuple):
    """Where everything goes in one file.

    Attributes
    ----------
    header_bytes : int
        Where data begins.
    chunks : list of Chunk
        In the order of the file.
    sizes, offsets : list of int
        Bytes of each chunk, and where it is in the file, ascending.
    objects : list of (ObjectChunk, int)
        With the offset of each; they come last.
    nbytes : int
        Of the file.
    entries : Entries
        Of the header.
    """

    header_bytes: int
    chunks: list[Chunk]
    sizes: list[int]
    offsets: list[int]
    objects: list[tuple[ObjectChunk, int]]
    nbytes: int
    entries: Entries

    def describe(self, stop: int) -> None:
        """Make the header's entries of chunks before `stop`; for idle moments before `header`."""
        self.entries.add(self.chunks, self.offsets, self.sizes, stop)

    def header(self) -> bytes:
        """Return the bytes before the data."""
        self.describe(len(self.chunks))
        return header_of(self.entries, self.objects, self.header_bytes)


def lay_out(
    chunks: Sequence[Chunk], objects: Sequence[ObjectChunk], layouts: Layouts | None = None
) -> FileLayout:
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
    names = [item.name for item in objects]
    kinds = [(chunk.name, chunk.box, chunk.partial, chunk.tensor.dtype) for chunk in chunks], names
    found = layouts.find(kinds) if layouts is not None else None
    if found is None:
        found = _arrange(chunks, names, kinds)
        if layouts is not None:
            layouts.keep(found)
    ordered = list(chunks) if found.order is None else [chunks[number] for number in found.order]
    kept = list(itertools.accumulate((len(item.data) for item in objects), initial=found.stop))
    return FileLayout(
        found.header_bytes,
        ordered,
        found.sizes,
        found.offsets,
        list(zip(objects, kept[:-1], strict=True)),
        kept[-1],
        found.entries,
    )


def _arrange(chunks: Sequence[Chunk], names: Sequence[str], kinds: Any) -> _Arrangement:
    sizes = [chunk.nbytes for chunk in chunks]
    room = room_for(chunks, names)
    order = None
    if any(size % BLOCK for size in sizes):
        rest = [number for number, size in enumerate(sizes) if size % BLOCK]
        rest.sort(key=lambda number: -chunks[number].tensor.dtype.itemsize)
        order = [number for number, size in enumerate(sizes) if size % BLOCK == 0] + rest
        sizes = [sizes[number] for number in order]
    ends = list(itertools.accumulate(sizes, initial=room))
    return _Arrangement(kinds, order, sizes, ends[:-1], room, ends[-1], Entries(room))
