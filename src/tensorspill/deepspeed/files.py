"""Files by path, as DeepSpeed names them, opened in engines that work in one folder each."""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from typing import Any

import torch

from tensorspill.engine import Engine, File
from tensorspill.errors import BrokenError, MissingFileError, UnsupportedError
from tensorspill.opening import open_engine

__all__ = ["Files", "path_of"]

#: Files kept open; a model has one for each parameter, and a process may open about a thousand.
KEPT_OPEN = 128


class Files:
    """Engines by folder and device, and the files that were used last.

    Parameters
    ----------
    options : dict
        Of the engines for host memory, see `open_engine`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._engines: dict[tuple[str, torch.device], Engine] = {}
        self._files: OrderedDict[tuple[str, torch.device, bool], File] = OrderedDict()
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
        key = (path, device, mode != "r")
        file = self._files.get(key)
        if file is None or not _still_there(path, file, size):
            return self._open(path, device, mode, size)
        self._files.move_to_end(key)
        return self._engine(os.path.dirname(path), device), file

    def _open(
        self, path: str, device: torch.device, mode: str, size: int | None
    ) -> tuple[Engine, File]:
        folder, name = os.path.split(path)
        engine = self._engine(folder, device)
        file = engine.open(name, mode, size)
        key = (path, device, mode != "r")
        stale = self._files.pop(key, None)
        self._files[key] = file
        if stale is not None:
            stale.close()
        while len(self._files) > KEPT_OPEN:
            self._files.popitem(last=False)[1].close()
        return engine, file

    def _engine(self, folder: str, device: torch.device) -> Engine:
        engine = self._engines.get((folder, device))
        if engine is None:
            options = self._options if device.type == "cpu" else {}
            engine = open_engine(folder, device, **options)
            self._engines[folder, device] = engine
        return engine


def _still_there(path: str, file: File, size: int | None) -> bool:
    """Whether the path still names the open file, and that is long enough."""
    if file.closed:
        return False
    try:
        named = os.stat(path)
    except OSError:
        return False
    held = os.fstat(file.fd)
    same = (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
    return same and (size is None or held.st_size >= size)


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
