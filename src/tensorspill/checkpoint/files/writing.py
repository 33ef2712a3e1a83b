"""Writing one file of a checkpoint."""

from __future__ import annotations

import os
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.checkpoint.files import recycling
from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.files.digesting import Digests
from tensorspill.checkpoint.files.durable import sync_folder
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.layout import FileLayout, Layouts, lay_out
from tensorspill.checkpoint.files.moving import gather, is_plain
from tensorspill.checkpoint.files.names import is_file_name
from tensorspill.checkpoint.files.pipeline import Pipeline
from tensorspill.checkpoint.files.quiet import collection_paused
from tensorspill.checkpoint.files.records import (
    BoxRecord,
    FileRecord,
    ObjectRecord,
    Written,
)
from tensorspill.checkpoint.files.slots import Slot, allocate
from tensorspill.engine.batch import REQUEST, Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.errors import NoSpaceError, UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.digest import digest

__all__ = ["DEPTH", "WINDOW", "write_file"]

#: Bytes of one batch: what an engine's queue holds, so that a second one keeps it full.
WINDOW = 32 << 20

#: Batches under way.
DEPTH = 3


def write_file(
    folder: str,
    name: str,
    chunks: Sequence[Chunk],
    objects: Sequence[ObjectChunk] = (),
    *,
    engine: Engine | Engines,
    staging: BufferPool,
    progress: Callable[[int], None] | None = None,
    layouts: Layouts | None = None,
) -> Written:
    """Write a safetensors file; it is durable when this returns.

    Parameters
    ----------
    folder : str
        That of a pending checkpoint, or any other; must exist, in or below the engine's folder.
    name : str
        Of the new file: letters, digits, ``_``, ``-`` and ``.``, with the end ``.safetensors``.
    chunks : sequence of Chunk
    objects : sequence of ObjectChunk
    engine : Engine or Engines
        An engine for host memory, or the engines of several devices.
    staging : BufferPool
        For content that can't move from where it is: other strides, other devices. Of 4 MiB at
        least, better 32 MiB, if there is such content.
    progress : callable, optional
        Called in this thread with the bytes written so far, as blocks complete.
    layouts : Layouts, optional
        Of files that were written before: one of the same chunks need not be laid out again.

    Raises
    ------
    SpillError
        What went wrong; the file is left as it is, to be swept with its folder.
    """
    if not is_file_name(name):
        raise UnsupportedError(f"{name!r} is no name for a file of a checkpoint", path=folder)
    begun = time.perf_counter()
    with collection_paused():
        layout = lay_out(chunks, objects, layouts)
    host = engine.host if isinstance(engine, Engines) else engine
    inside = os.path.relpath(
        os.path.join(os.path.realpath(folder), name), os.path.realpath(host.folder)
    )
    reused = recycling.take(folder, name, layout.nbytes)
    with _opened(host, inside, "r+" if reused else "x", layout.nbytes, folder) as file:
        # What was recycled may be longer.
        os.ftruncate(file.fd, layout.nbytes)
        writer = _Writer(layout, engine, {host: file}, inside, staging, progress)
        try:
            written = writer.write(name)
        finally:
            writer.close()
        file.sync()
    sync_folder(folder)
    header = FileRecord(name, layout.nbytes, layout.header_bytes, written.header_digest)
    seconds = time.perf_counter() - begun
    return Written(header, written.boxes, written.objects, seconds, reused)


class _Records(NamedTuple):
    header_digest: int
    boxes: tuple[tuple[str, torch.dtype, BoxRecord], ...]
    objects: tuple[tuple[str, ObjectRecord], ...]


def _opened(engine: Engine, name: str, mode: str, nbytes: int, folder: str) -> File:
    """Open a file with room for `nbytes`, at the cost of recycled ones if need be."""
    try:
        return engine.open(name, mode, nbytes)
    except NoSpaceError:
        if not recycling.drop(folder):
            raise
    return engine.open(name, mode, nbytes)


class _Writer:
    """Moves a layout to its file, and computes the digests beside that."""

    def __init__(
        self,
        layout: FileLayout,
        engine: Engine | Engines,
        files: dict[Engine, File],
        inside: str,
        staging: BufferPool,
        progress: Callable[[int], None] | None,
    ) -> None:
        self._layout = layout
        self._engine = engine
        self._files = files
        self._host = next(iter(files))
        self._inside = inside
        self._staging = staging
        self._progress = progress
        self._done = 0
        self._slot: Slot | None = None
        self._pipeline = Pipeline(DEPTH)
        self._digests = Digests(layout.sizes, layout.offsets)
        self._records: list[tuple[str, torch.dtype, BoxRecord]] = []
        self._file_name = ""

    def write(self, name: str) -> _Records:
        """Write everything; when this returns, all transfers have ended."""
        layout, first = self._layout, 0
        self._records = []
        self._file_name = name
        with self._pipeline:
            for lane, group in groupby(self._lanes()):
                last = first + len(list(group))
                if lane is None:
                    self._write_staged(first, last)
                else:
                    self._write_in_place(lane, first, last)
                first = last
            header = layout.header()
            self._write_bytes([(header, 0)])
            self._write_bytes([(item.data, offset) for item, offset in layout.objects])
            # While the last transfers are under way.
            self._describe(layout.nbytes)
            return _Records(digest(header), tuple(self._records), self._objects())

    def _describe(self, position: int) -> None:
        """Compute the digests up to a place in the file and make the records of what is there."""
        layout, digests = self._layout, self._digests
        first = len(self._records)
        last = bisect_left(layout.offsets, position)
        digests.compute(position)
        # Of the last one there may be more to come.
        if last and layout.offsets[last - 1] + layout.sizes[last - 1] > position:
            last -= 1
        if last <= first:
            return
        part = slice(first, last)
        with collection_paused():
            layout.describe(last)
            self._records += [
                (
                    chunk.name,
                    chunk.tensor.dtype,
                    BoxRecord(chunk.box, self._file_name, offset, nbytes, span, found),
                )
                for chunk, offset, nbytes, span, found in zip(
                    layout.chunks[part],
                    layout.offsets[part],
                    layout.sizes[part],
                    digests.spans[part],
                    digests.of_chunks(first, last),
                    strict=True,
                )
            ]

    def _objects(self) -> tuple[tuple[str, ObjectRecord], ...]:
        name = self._file_name
        return tuple(
            (item.name, ObjectRecord(name, offset, len(item.data), digest(item.data)))
            for item, offset in self._layout.objects
        )

    def close(self) -> None:
        """Close what was opened here."""
        for engine, file in self._files.items():
            if engine is not self._host:
                file.close()

    def _lanes(self) -> list[Engine | None]:
        """Return the engine that moves each chunk from where it is; None if it has to be staged."""
        tensors = [chunk.tensor for chunk in self._layout.chunks]
        return [self._lane(tensor) if is_plain(tensor) else None for tensor in tensors]

    def _lane(self, tensor: torch.Tensor) -> Engine | None:
        if tensor.is_cpu:
            return self._host
        return self._engine.direct(tensor.device) if isinstance(self._engine, Engines) else None

    def _file(self, engine: Engine) -> File:
        if engine not in self._files:
            self._files[engine] = engine.open(self._inside, "r+")
        return self._files[engine]

    # -- content that moves from where it is ---------------------------------------------------

    def _write_bytes(self, items: Sequence[tuple[bytes, int]]) -> None:
        data = [np.frombuffer(item, np.uint8) for item, _ in items]
        self._submit_windows(
            self._host,
            [array.ctypes.data for array in data],
            [array.nbytes for array in data],
            [offset for _, offset in items],
            data,
        )

    def _write_in_place(self, engine: Engine, first: int, last: int) -> None:
        layout, digests = self._layout, self._digests
        tensors = [
            chunk.tensor
            for chunk in layout.chunks[first:last]
            if isinstance(chunk.tensor, torch.Tensor)
        ]
        addresses = [tensor.data_ptr() for tensor in tensors]
        sizes, offsets = layout.sizes[first:last], layout.offsets[first:last]
        if engine is self._host:
            digests.in_memory(first, addresses)
            self._submit_windows(engine, addresses, sizes, offsets, tensors, self._describe)
        else:
            self._submit_windows(engine, addresses, sizes, offsets, tensors)
            digests.compute_on_device(first, tensors)
            self._describe(offsets[-1] + sizes[-1])

    def _submit_windows(
        self,
        engine: Engine,
        addresses: list[int],
        sizes: list[int],
        offsets: list[int],
        keep: Sequence[object],
        beside: Callable[[int], None] | None = None,
    ) -> None:
        """Write ranges that follow one another in the file, in batches.

        `beside` is called while they are under way, with the place in the file up to which they
        were submitted.
        """
        table = np.zeros(len(addresses), REQUEST)
        table["addr"], table["nbytes"], table["offset"] = addresses, sizes, offsets
        table["write"] = 1
        table = table[table["nbytes"] > 0]
        if not len(table):
            return
        file = self._file(engine)
        ends = table["offset"] + table["nbytes"]
        position, stop = int(table["offset"][0]), int(ends[-1])
        while position < stop:
            # At multiples of the window, and so of blocks, wherever chunks begin.
            edge = min((position // WINDOW + 1) * WINDOW, stop)
            batch = Batch(_between(table, ends, position, edge), (file,), (keep,))
            self._submit(engine, batch)
            position = edge
            if beside is not None:
                beside(position)

    def _submit(self, engine: Engine, batch: Batch, buffer: Buffer | None = None) -> None:
        def finish() -> None:
            self._done += batch.nbytes
            if self._progress is not None:
                self._progress(self._done)

        self._pipeline.put(engine.submit(batch), finish, buffer)

    # -- content that is staged ----------------------------------------------------------------

    def _write_staged(self, first: int, last: int) -> None:
        """Copy content into staging memory, as much as a slot takes, and write it from there."""
        layout = self._layout
        try:
            for number in range(first, last):
                done, nbytes = 0, layout.sizes[number]
                while done < nbytes:
                    slot = self._slot
                    if slot is None or slot.room < min(nbytes - done, self._digests.spans[number]):
                        self._write_slot()
                        buffer = allocate(self._staging, self._pipeline)
                        slot = self._slot = Slot(buffer, layout.offsets[number] + done)
                    done += self._fill(slot, number, done)
            self._write_slot()
        finally:
            if self._slot is not None:
                self._slot.buffer.release()

    def _fill(self, slot: Slot, number: int, done: int) -> int:
        """Copy the next of a chunk's bytes into a slot; return how many."""
        tensor, span = self._layout.chunks[number].tensor, self._digests.spans[number]
        # All that is left, or as many whole spans as there is room for.
        left = self._layout.sizes[number] - done
        part = left if left <= slot.room else slot.room // span * span
        address = slot.buffer.address + slot.used
        memory = slot.take(part).view(tensor.dtype)
        gather(tensor, done // tensor.dtype.itemsize, memory)
        self._digests.in_part(number, done, part, address)
        return part

    def _write_slot(self) -> None:
        """Write what the slot has; its memory is the pipeline's from then on."""
        slot, self._slot = self._slot, None
        if slot is None:
            return
        # Before the transfer, while it is in the caches.
        self._describe(slot.offset + slot.used)
        table = np.zeros(1, REQUEST)
        table["addr"], table["nbytes"] = slot.buffer.address, slot.used
        table["offset"], table["write"] = slot.offset, 1
        batch = Batch(table, (self._file(self._host),), (slot.buffer.tensor,))
        self._submit(self._host, batch, slot.buffer)


def _between(
    table: NDArray[np.void], ends: NDArray[np.int64], position: int, edge: int
) -> NDArray[np.void]:
    """Return the requests of a sorted table, cut to the range of the file."""
    first = int(np.searchsorted(ends, position, "right"))
    last = int(np.searchsorted(table["offset"], edge, "left"))
    part = table[first:last].copy()
    head = max(position - int(part["offset"][0]), 0)
    part["addr"][0] += head
    part["offset"][0] += head
    part["nbytes"][0] -= head
    part["nbytes"][-1] -= max(int(ends[last - 1]) - edge, 0)
    return part
