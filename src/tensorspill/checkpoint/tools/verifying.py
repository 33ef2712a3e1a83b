"""Reading all of a checkpoint, and comparing every byte with the digests of what was written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.fetching import Fetcher, Range
from tensorspill.checkpoint.files.manifest import Manifest
from tensorspill.checkpoint.files.opened import OpenFiles, read_manifest
from tensorspill.checkpoint.files.records import BoxRecord, ObjectRecord
from tensorspill.checkpoint.files.slots import SLOT
from tensorspill.checkpoint.files.writing import DEPTH
from tensorspill.engine.file import File
from tensorspill.engine.request import Request
from tensorspill.errors import SpillError
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.digest import digest

__all__ = ["Problem", "Verification", "verify"]

_STAGING = (DEPTH + 1) * (SLOT + (1 << 20))


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that is not as it was written.

    Attributes
    ----------
    path : str
    what : str
    offset, nbytes : int or None
        Which bytes of the file, where that is known.
    """

    path: str
    what: str
    offset: int | None = None
    nbytes: int | None = None


@dataclass(frozen=True, slots=True)
class Verification:
    """What `verify` found.

    Attributes
    ----------
    checkpoint : str
        Path.
    tensors, objects, files : int
        How many were looked at.
    nbytes : int
        Bytes that were read and compared.
    seconds : float
    problems : tuple of Problem
        None if all is well.
    """

    checkpoint: str
    tensors: int
    objects: int
    files: int
    nbytes: int
    seconds: float
    problems: tuple[Problem, ...]


def verify(
    folder: str | os.PathLike[str], progress: Callable[[int, int], None] | None = None
) -> Verification:
    """Read a checkpoint whole, at the rate of the drive, and check it.

    Parameters
    ----------
    folder : str or path
        Of the checkpoint.
    progress : callable, optional
        Called with the bytes checked and the bytes of the checkpoint.

    Raises
    ------
    SpillError
        There is no manifest to compare with, or it is damaged; problems with files are returned.
    """
    manifest, begun = read_manifest(folder), time.perf_counter()
    path = os.path.abspath(os.fspath(folder))
    with Engines(path) as engines, BufferPool(_STAGING, page_lock="no") as staging:
        checking = _Checking(engines, staging, path, manifest, progress)
        try:
            checking.run()
        finally:
            checking.files.close()
    return Verification(
        path,
        len(manifest.tensors),
        len(manifest.objects),
        len(manifest.files),
        checking.done,
        time.perf_counter() - begun,
        tuple(checking.problems),
    )


class _Checking:
    """The state of one verification."""

    def __init__(
        self,
        engines: Engines,
        staging: BufferPool,
        folder: str,
        manifest: Manifest,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.files = OpenFiles(engines, folder, manifest.files)
        self.problems: list[Problem] = []
        self.done = 0
        self._host = engines.host
        self._staging = staging
        self._manifest = manifest
        self._progress = progress
        self._total = manifest.nbytes

    def run(self) -> None:
        """Go through the files, one after the other."""
        boxes: dict[str, list[BoxRecord]] = {}
        objects: dict[str, list[tuple[str, ObjectRecord]]] = {}
        for tensor in self._manifest.tensors.values():
            for box in tensor.boxes:
                boxes.setdefault(box.file, []).append(box)
        for name, item in self._manifest.objects.items():
            objects.setdefault(item.file, []).append((name, item))
        for record in self._manifest.files:
            try:
                file = self.files.get(record.name)
                self._bytes(file, 0, record.header_bytes, record.header_digest, "The file's header")
                self._boxes(file, boxes.get(record.name, []))
                for name, item in objects.get(record.name, []):
                    what = f"Object {name!r}"
                    self._bytes(file, item.offset, item.nbytes, item.digest, what)
            except SpillError as error:
                where = error.path or record.name
                self.problems.append(Problem(where, str(error), error.offset, error.nbytes))

    def _boxes(self, file: File, boxes: list[BoxRecord]) -> None:
        boxes.sort(key=lambda box: box.offset)
        with Fetcher(self._host, self._staging, self._wrong) as fetcher:
            for box in boxes:
                fetcher.through(Range.of(file, box), self._count)

    def _bytes(self, file: File, offset: int, nbytes: int, expected: int, what: str) -> None:
        memory = torch.empty(nbytes, dtype=torch.uint8)
        self._host.submit([Request(memory, file, offset)]).result()
        if digest(memory) != expected:
            self.problems.append(Problem(file.path, f"{what} was changed", offset, nbytes))
        self._count(0, memory)

    def _wrong(self, path: str, offset: int, nbytes: int) -> None:
        self.problems.append(Problem(path, "Bytes were changed (digest)", offset, nbytes))

    def _count(self, _done: int, memory: torch.Tensor) -> None:
        self.done += memory.numel()
        if self._progress is not None:
            self._progress(self.done, self._total)
