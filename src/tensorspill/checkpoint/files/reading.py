"""Reading parts of tensors out of a checkpoint's files."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Self

import torch

from tensorspill.checkpoint.files.chunks import Box, element_boxes
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.fetching import Fetcher, Range
from tensorspill.checkpoint.files.manifest import Manifest
from tensorspill.checkpoint.files.moving import is_plain, scatter
from tensorspill.checkpoint.files.opened import OpenFiles, read_manifest
from tensorspill.checkpoint.files.quiet import collection_paused
from tensorspill.checkpoint.files.records import BoxRecord, TensorRecord
from tensorspill.checkpoint.files.runs import Run, runs_of
from tensorspill.checkpoint.files.slots import SLOT
from tensorspill.checkpoint.files.writing import DEPTH
from tensorspill.engine.request import Request
from tensorspill.errors import (
    ClosedError,
    CorruptError,
    MissingNameError,
    UnsupportedError,
)
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.digest import digest
from tensorspill.pool.sizes import round_down, round_up

__all__ = ["ReadRecord", "Reader", "Want", "read_manifest"]


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A part of a tensor, and where it shall go.

    Attributes
    ----------
    name : str
    box : Box
    destination : torch.Tensor
        Of shape ``box.lengths`` and the tensor's own dtype; any strides, any device.
    """

    name: str
    box: Box
    destination: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """What a read did.

    Attributes
    ----------
    bytes_needed : int
        Bytes of the destinations.
    bytes_read : int
        Bytes that the drive was asked for.
    seconds : float
    """

    bytes_needed: int
    bytes_read: int
    seconds: float


class _Edge(NamedTuple):
    """A range of a stored part that goes through staging memory, for one run."""

    start: int
    stop: int
    run: Run


class Reader:
    """Reads a committed checkpoint; every byte is checked against the digests before it counts.

    May be used from any thread; reads take turns.

    Parameters
    ----------
    folder : str or path
        Of the checkpoint.
    manifest : Manifest, optional
        Read from the folder if not given.
    engine : Engines, optional
        For the folder or one above it; opened here if not given.
    staging : BufferPool, optional
        Of 8 MiB at least; made here when needed if not given.

    Attributes
    ----------
    folder : str
    manifest : Manifest
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        manifest: Manifest | None = None,
        *,
        engine: Engines | None = None,
        staging: BufferPool | None = None,
    ) -> None:
        self.folder = os.path.abspath(os.fspath(folder))
        self.manifest = read_manifest(folder) if manifest is None else manifest
        self._owned: list[Engines | BufferPool] = []
        self._engine = Engines(self.folder) if engine is None else engine
        if engine is None:
            self._owned.append(self._engine)
        self._staging = staging
        self._files = OpenFiles(self._engine, self.folder, self.manifest.files)
        self._lock = threading.Lock()
        self._closed = False

    def read(self, wants: Iterable[Want]) -> ReadRecord:
        """Read parts of tensors into their destinations.

        Raises
        ------
        CorruptError
            Bytes differ from those written, or a file has another length. Destinations are
            undefined.
        MissingNameError, UnsupportedError
            There is no such tensor, or the destination has another dtype or shape; nothing was
            read.
        BrokenError
            A file is missing or can't be read.
        """
        wants = list(wants)
        records = [self._checked(want) for want in wants]
        with self._lock:
            self._check_open()
            begun, before = time.perf_counter(), self._bytes_read()
            staging = self._pool(wants)
            with collection_paused():
                parts = _by_place(wants, records)
            with Fetcher(self._engine.host, staging) as fetcher:
                for record, runs in parts:
                    self._fetch(fetcher, record, runs)
            return ReadRecord(
                sum(want.destination.nbytes for want in wants),
                self._bytes_read() - before,
                time.perf_counter() - begun,
            )

    def read_elements(self, name: str, start: int, out: torch.Tensor) -> ReadRecord:
        """Read elements `start` and following of a tensor, in row-major order, into flat `out`.

        Raises
        ------
        SpillError
            As `read`.
        """
        wants, done = [], 0
        for box in element_boxes(self._record(name).shape, start, start + out.numel()):
            wants.append(Want(name, box, out[done : done + box.numel].view(box.lengths)))
            done += box.numel
        return self.read(wants)

    def read_object(self, name: str) -> bytes:
        """Return the bytes of a Python object, which are not unpickled here.

        Raises
        ------
        MissingNameError, CorruptError, BrokenError
            As `read`.
        """
        record = self.manifest.objects.get(name)
        if record is None:
            raise MissingNameError(f"No object {name!r} in the checkpoint", path=self.folder)
        memory = torch.empty(record.nbytes, dtype=torch.uint8)
        with self._lock:
            self._check_open()
            file = self._files.get(record.file)
            self._engine.host.submit([Request(memory, file, record.offset)]).result()
        if digest(memory) != record.digest:
            raise CorruptError(
                f"Object {name!r} is not what was written (digest mismatch)",
                path=file.path,
                offset=record.offset,
                nbytes=record.nbytes,
            )
        return memory.numpy().tobytes()

    # -- what a read consists of -----------------------------------------------------------------

    def _record(self, name: str) -> TensorRecord:
        record = self.manifest.tensors.get(name)
        if record is None:
            raise MissingNameError(f"No tensor {name!r} in the checkpoint", path=self.folder)
        return record

    def _checked(self, want: Want) -> TensorRecord:
        record = self._record(want.name)
        out = want.destination
        if out.dtype is not record.dtype or tuple(out.shape) != want.box.lengths:
            raise UnsupportedError(
                f"Tensor {want.name!r} is {record.dtype}; part {want.box} does not fit into "
                f"{tuple(out.shape)} of {out.dtype}",
                path=self.folder,
            )
        if not want.box.inside(record.shape):
            raise UnsupportedError(
                f"{want.box} is not inside of tensor {want.name!r}, {record.shape}",
                path=self.folder,
            )
        return record

    def _fetch(self, fetcher: Fetcher, record: BoxRecord, runs: Sequence[Run]) -> None:
        """Fetch what is needed of one stored part."""
        whole = Range.of(self._files.get(record.file), record)
        edges: list[_Edge] = []
        for run in runs:
            start, stop = run.start, run.start + run.nbytes
            low, high = _spans(record, start, stop)
            out = run.destination
            if run.whole and out.is_cpu and is_plain(out):
                first, last = round_up(start, record.span), stop
                if stop < record.nbytes:
                    last = round_down(stop, record.span)
                if first < last:
                    inner = whole.cut(first, last - first)
                    fetcher.into(inner, out.data_ptr() + first - start, out)
                    edges += [_Edge(a, b, run) for a, b in ((low, first), (last, high)) if a < b]
                    continue
            edges.append(_Edge(low, high, run))
        for start, stop, shared in _joined(edges):
            fetcher.through(whole.cut(start, stop - start), _Deliver(start, shared))

    def _pool(self, wants: Sequence[Want]) -> BufferPool:
        """Return the staging memory; page-locked where it is made for a GPU's sake."""
        if self._staging is None:
            on_gpu = any(want.destination.is_cuda for want in wants)
            nbytes = (DEPTH + 1) * (SLOT + (1 << 20))
            self._staging = BufferPool(nbytes, page_lock="auto" if on_gpu else "no")
            self._owned.append(self._staging)
        return self._staging

    def _bytes_read(self) -> int:
        return sum(path.io_bytes for path in self._engine.host.statistics().by_path.values())

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("The reader is closed", path=self.folder)

    def close(self) -> None:
        """Close the files, and what was opened here; a second time does no harm."""
        with self._lock:
            self._closed = True
            self._files.close()
            while self._owned:
                self._owned.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Deliver:
    """Hands what was read of a stored part to the runs that need it."""

    def __init__(self, start: int, runs: Sequence[Run]) -> None:
        self._start = start
        self._runs = runs

    def __call__(self, done: int, memory: torch.Tensor) -> None:
        begin = self._start + done
        for run in self._runs:
            low = max(begin, run.start)
            high = min(begin + memory.numel(), run.start + run.nbytes)
            if low < high:
                dtype = run.destination.dtype
                data = memory[low - begin : high - begin].view(dtype)
                first = (low - run.start) // dtype.itemsize
                scatter(data, first, run.shape, run.wanted, run.destination)


def _by_place(
    wants: Sequence[Want], records: Sequence[TensorRecord]
) -> list[tuple[BoxRecord, list[Run]]]:
    """Return the runs of all wants by stored part, in the order of files and offsets."""
    parts: dict[int, tuple[BoxRecord, list[Run]]] = {}
    for want, tensor in zip(wants, records, strict=True):
        for record in tensor.boxes:
            if record.box == want.box:
                run = Run(
                    record, 0, want.box.lengths, Box.whole(want.box.lengths), want.destination
                )
                parts.setdefault(id(record), (record, []))[1].append(run)
                continue
            shared = record.box.intersection(want.box)
            if shared is not None:
                out = shared.relative_to(want.box).of(want.destination)
                parts.setdefault(id(record), (record, []))[1].extend(runs_of(record, shared, out))
    return sorted(parts.values(), key=lambda part: (part[0].file, part[0].offset))


def _joined(edges: list[_Edge]) -> Iterator[tuple[int, int, list[Run]]]:
    """Join ranges that overlap, so that no span is read twice for neighbouring wants."""
    edges.sort(key=lambda edge: edge.start)
    at = 0
    while at < len(edges):
        start, stop, runs = edges[at].start, edges[at].stop, [edges[at].run]
        at += 1
        while at < len(edges) and edges[at].start < stop:
            stop = max(stop, edges[at].stop)
            runs.append(edges[at].run)
            at += 1
        yield start, stop, runs


def _spans(record: BoxRecord, start: int, stop: int) -> tuple[int, int]:
    """Return the range in whole spans around a range of a stored part."""
    return round_down(start, record.span), min(round_up(stop, record.span), record.nbytes)
