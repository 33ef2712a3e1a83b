"""Files by path, as DeepSpeed names them, opened in engines that work in one folder each."""

from __future__ import annotations

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tensorspill.engine import Engine, File
from tensorspill.errors import BrokenError, MissingFileError, UnsupportedError
from tensorspill.opening import open_engine

__all__ = ["Files", "path_of"]

#: Files are kept open, since a model has one for each parameter: an eighth as many as the process
#: may open at a time, but not less nor more than this.
FEWEST_KEPT, MOST_KEPT = 128, 8192


class Files:
    """Engines by folder and device, and the files that were used last.

    Parameters
    ----------
    let_go : callable, optional
        Called with a file that is to be closed, so that whoever means to use it does so first.
    **options
        Of the engines for host memory, see `open_engine`.
    """

    def __init__(self, let_go: Callable[[File], None] | None = None, **options: Any) -> None:
        self._let_go = let_go
        self._options = options
        self._engines: dict[tuple[str, torch.device], Engine] = {}
        self._files: OrderedDict[tuple[str, torch.device, bool], _Kept] = OrderedDict()
        self._most = _kept_open()
        self._lock = threading.Lock()

    def readable(self, path: str, device: torch.device) -> tuple[Engine, File]:
        """Return a file to read from, and its engine.

        Raises
        ------
        MissingFileError, BrokenError
            It can't be opened.
        """
        with self._lock:
            return self._file(path, device, "r", None)

    def writable(self, path: str, device: torch.device, size: int) -> tuple[Engine, File]:
        """Return a file to write to, at least `size` bytes long, and its engine; made if missing.

        The room is taken before the write: writes that make a file longer block the submission.

        Raises
        ------
        NoSpaceError, BrokenError
            It can't be made, opened, or grown.
        """
        with self._lock:
            while True:
                try:
                    return self._file(path, device, "r+", size)
                except MissingFileError:
                    pass
                try:
                    return self._open(path, device, "x", size)
                except BrokenError as error:
                    if error.errno != errno.EEXIST:  # which says that another process was faster
                        raise

    def close(self) -> None:
        """Wait for all transfers and close files and engines; a second time does no harm."""
        with self._lock:
            self._files.clear()
            engines, self._engines = list(self._engines.values()), {}
        for engine in engines:
            engine.close()

    def _file(
        self, path: str, device: torch.device, mode: str, size: int | None
    ) -> tuple[Engine, File]:
        # What is open for writing can be read from as well.
        for writable in (True, False) if mode == "r" else (True,):
            key = (path, device, writable)
            kept = self._files.get(key)
            if kept is not None and kept.is_at(path, size):
                self._files.move_to_end(key)
                return kept.engine, kept.file
        return self._open(path, device, mode, size)

    def _open(
        self, path: str, device: torch.device, mode: str, size: int | None
    ) -> tuple[Engine, File]:
        folder, name = os.path.split(path)
        engine = self._engine(folder, device)
        file = engine.open(name, mode, size)
        key = (path, device, mode != "r")
        stale = self._files.pop(key, None)
        self._files[key] = _Kept.of(engine, file)
        if stale is not None:
            self._close(stale.file)
        while len(self._files) > self._most:
            self._close(self._files.popitem(last=False)[1].file)
        return engine, file

    def _close(self, file: File) -> None:
        if self._let_go is not None:
            self._let_go(file)
        file.close()

    def _engine(self, folder: str, device: torch.device) -> Engine:
        engine = self._engines.get((folder, device))
        if engine is None:
            options = self._options if device.type == "cpu" else {}
            engine = open_engine(folder, device, **options)
            self._engines[folder, device] = engine
        return engine


class _Kept(NamedTuple):
    """An open file, its engine, and which file of which file system it is."""

    engine: Engine
    file: File
    device: int
    inode: int

    @classmethod
    def of(cls, engine: Engine, file: File) -> _Kept:
        held = os.fstat(file.fd)
        return cls(engine, file, held.st_dev, held.st_ino)

    def is_at(self, path: str, size: int | None) -> bool:
        """Whether the path still names the open file, and that is long enough."""
        if self.file.closed:
            return False
        try:
            named = os.stat(path)
        except OSError:
            return False
        same = (named.st_dev, named.st_ino) == (self.device, self.inode)
        return same and (size is None or named.st_size >= size)


def _kept_open() -> int:
    """Return how many files are kept open."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return MOST_KEPT
    return min(max(FEWEST_KEPT, limit // 8), MOST_KEPT)


def path_of(fd: int) -> str:
    """Return the path of an open descriptor.

    Raises
    ------
    UnsupportedError
        It has none any more, or is not a file.
    """
    path = os.readlink(f"/proc/self/fd/{fd}")
    try:
        if os.path.samestat(os.stat(path), os.fstat(fd)):
            return path
    except OSError:
        pass
    raise UnsupportedError(
        f"Descriptor {fd} is of no file that can be opened again",
        path=path,
        remedy="Give the file's name",
    )
