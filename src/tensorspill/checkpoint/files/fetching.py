"""Fetching ranges of a checkpoint's files in batches, each byte checked before it counts."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
import torch

from tensorspill.checkpoint.files.digesting import digest_memory
from tensorspill.checkpoint.files.layout import BLOCK
from tensorspill.checkpoint.files.pipeline import Pipeline
from tensorspill.checkpoint.files.records import BoxRecord, digest_count
from tensorspill.checkpoint.files.slots import Slot, allocate
from tensorspill.checkpoint.files.writing import DEPTH, WINDOW
from tensorspill.engine.batch import REQUEST, Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.errors import CorruptError
from tensorspill.pool.buffer_pool import BufferPool

__all__ = ["Fetcher", "Range"]

Deliver = Callable[[torch.Tensor], None]


class Range(NamedTuple):
    """Bytes of a file, in whole spans of digests (but the last).

    Attributes
    ----------
    file : File
    offset, nbytes : int
    span : int
        Bytes that each digest is of.
    digests : bytes
        8 bytes for each span.
    """

    file: File
    offset: int
    nbytes: int
    span: int
    digests: bytes

    @classmethod
    def of(cls, file: File, record: BoxRecord) -> Range:
        """Return the range of a stored part."""
        return cls(file, record.offset, record.nbytes, record.span, record.digests)

    def cut(self, start: int, nbytes: int) -> Range:
        """Return a part that begins at a multiple of the span."""
        if nbytes == self.nbytes:
            return self
        first = start // self.span
        digests = self.digests[8 * first : 8 * (first + digest_count(nbytes, self.span))]
        return Range(self.file, self.offset + start, nbytes, self.span, digests)


class _Window:
    """A batch that is being gathered."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, int, int, int, int]] = []
        self.files: dict[File, int] = {}
        self.ranges: list[tuple[Range, int]] = []
        self.keep: list[object] = []
        self.deliveries: list[tuple[torch.Tensor, Deliver]] = []
        self.slot: Slot | None = None
        self.nbytes = 0


class Fetcher:
    """Reads ranges into memory of the caller's or of its own, checks them, and hands them on.

    A context manager: leaving it well means that everything was read, checked and delivered.

    Parameters
    ----------
    engine : Engine
        For host memory.
    staging : BufferPool
    wrong : callable, optional
        Called for each span whose digest differs, with path, offset and bytes; if not given, the
        first one raises `CorruptError`.
    """

    def __init__(
        self,
        engine: Engine,
        staging: BufferPool,
        wrong: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self._engine = engine
        self._staging = staging
        self._wrong = wrong or _raise
        self._pipeline = Pipeline(DEPTH)
        self._window = _Window()

    def into(self, wanted: Range, address: int, owner: object) -> None:
        """Read a range straight into host memory, which `owner` keeps alive."""
        if wanted.nbytes <= WINDOW - self._window.nbytes:
            self._window.keep.append(owner)
            self._add(wanted, address)
            return
        done = 0
        while done < wanted.nbytes:
            if self._window.nbytes >= WINDOW:
                self._flush()
            room = max((WINDOW - self._window.nbytes) // wanted.span, 1) * wanted.span
            part = min(wanted.nbytes - done, room)
            self._window.keep.append(owner)
            self._add(wanted.cut(done, part), address + done)
            done += part

    def through(self, wanted: Range, deliver: Callable[[int, torch.Tensor], None]) -> None:
        """Read a range through staging memory.

        `deliver` is called with each part that was read and checked, and how many bytes of the
        range come before it; the part may be used during that call only.
        """
        done = 0
        while done < wanted.nbytes:
            slot = self._window.slot
            part = self._fitting(slot, wanted, done)
            if part == 0:
                if slot is not None:
                    self._flush()
                self._window.slot = Slot(allocate(self._staging, self._pipeline, BLOCK))
                continue
            assert slot is not None
            slot.used += self._gap(slot, wanted.offset + done)
            address = slot.buffer.address + slot.used
            memory = slot.take(part)
            self._add(wanted.cut(done, part), address)
            self._window.deliveries.append((memory, _bound(deliver, done)))
            done += part

    def _fitting(self, slot: Slot | None, wanted: Range, done: int) -> int:
        """Return how much of the rest fits into a slot: all, or whole spans, or nothing."""
        if slot is None:
            return 0
        room = slot.room - self._gap(slot, wanted.offset + done)
        left = wanted.nbytes - done
        if left <= room:
            return left
        return max(room, 0) // wanted.span * wanted.span

    @staticmethod
    def _gap(slot: Slot, offset: int) -> int:
        """Return what to leave free, so that blocks of the file can move without another copy."""
        return (offset - slot.used) % BLOCK

    def _add(self, part: Range, address: int) -> None:
        window = self._window
        number = window.files.setdefault(part.file, len(window.files))
        window.rows.append((address, part.nbytes, part.offset, number, 0))
        window.ranges.append((part, address))
        window.nbytes += part.nbytes

    def _flush(self) -> None:
        """Submit what was gathered."""
        window, self._window = self._window, _Window()
        buffer = None if window.slot is None else window.slot.buffer
        if not window.rows:
            if buffer is not None:
                buffer.release()
            return
        batch = Batch(np.array(window.rows, REQUEST), tuple(window.files), (window.keep, buffer))
        self._pipeline.put(self._engine.submit(batch), lambda: self._finish(window), buffer)

    def _finish(self, window: _Window) -> None:
        self._check(window.ranges)
        for memory, deliver in window.deliveries:
            deliver(memory)

    def _check(self, ranges: list[tuple[Range, int]]) -> None:
        nbytes = np.array([part.nbytes for part, _ in ranges], "i8")
        spans = np.array([part.span for part, _ in ranges], "i8")
        counts = -(-nbytes // spans)
        owner = np.repeat(np.arange(len(ranges)), counts)
        begin = (np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)) * spans[
            owner
        ]
        addresses = np.array([address for _, address in ranges], "i8")[owner] + begin
        sizes = np.minimum(spans[owner], nbytes[owner] - begin)
        expected = np.frombuffer(b"".join(part.digests for part, _ in ranges), "<u8")
        for row in np.flatnonzero(digest_memory(addresses, sizes) != expected).tolist():
            part = ranges[owner[row]][0]
            self._wrong(part.file.path, part.offset + int(begin[row]), int(sizes[row]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._pipeline:
            if error is None:
                self._flush()
                return
            slot = self._window.slot
            if slot is not None:
                slot.buffer.release()
            self._pipeline.stop()


def _bound(deliver: Callable[[int, torch.Tensor], None], done: int) -> Deliver:
    return lambda memory: deliver(done, memory)


def _raise(path: str, offset: int, nbytes: int) -> None:
    raise CorruptError(
        "What is in the file is not what was written (digest mismatch)",
        path=path,
        offset=offset,
        nbytes=nbytes,
        remedy="Load another checkpoint; the drive or file system may be failing",
    )
