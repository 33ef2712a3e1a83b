"""The files of a checkpoint, opened when they are needed and checked as they are."""

from __future__ import annotations

import os
import stat

from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.manifest import MANIFEST, Manifest
from tensorspill.checkpoint.files.records import FileRecord
from tensorspill.engine.file import File
from tensorspill.errors import BrokenError, CorruptError, UnsupportedError

__all__ = ["OpenFiles", "read_manifest"]

#: Files that are open at a time.
MOST = 64


class OpenFiles:
    """Files of one checkpoint; for one thread at a time.

    Parameters
    ----------
    engines : Engines
        For the folder, or one above it.
    folder : str
        Of the checkpoint.
    files : tuple of FileRecord
    """

    def __init__(self, engines: Engines, folder: str, files: tuple[FileRecord, ...]) -> None:
        self._engines = engines
        self._folder = folder
        self._records = {file.name: file for file in files}
        self._open: dict[str, File] = {}

    def get(self, name: str) -> File:
        """Return an open file.

        Raises
        ------
        CorruptError
            It has another length than it had when it was written.
        UnsupportedError
            It is a link, or no file.
        BrokenError
            It is missing, or can't be opened.
        """
        if name not in self._open:
            while len(self._open) >= MOST:
                self._open.pop(next(iter(self._open))).close()
            self._open[name] = self._opened(self._records[name])
        return self._open[name]

    def _opened(self, record: FileRecord) -> File:
        path = os.path.join(self._folder, record.name)
        try:
            # Opening anything else, such as a pipe, might wait for ever.
            regular = stat.S_ISREG(os.lstat(path).st_mode)
        except OSError as error:
            raise BrokenError.from_oserror(error, "Can't open the file", path=path) from error
        if not regular:
            raise UnsupportedError("A file of the checkpoint is a link, or no file", path=path)
        host = self._engines.host
        inside = os.path.join(os.path.realpath(self._folder), record.name)
        file = host.open(os.path.relpath(inside, os.path.realpath(host.folder)), "r")
        found = file.size
        if found != record.nbytes:
            file.close()
            raise CorruptError(
                f"The file has {found} bytes, and had {record.nbytes} when it was written",
                path=path,
            )
        return file

    def close(self) -> None:
        """Close all; a second time does no harm."""
        while self._open:
            self._open.popitem()[1].close()


def read_manifest(folder: str | os.PathLike[str]) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises
    ------
    MissingFileError
        The folder is missing, or has no manifest: it is no committed checkpoint.
    CorruptError
        See `Manifest.from_json`.
    BrokenError
        It can't be read.
    """
    path = os.path.join(os.path.abspath(os.fspath(folder)), MANIFEST)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            text = file.read()
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't read the manifest", path=path) from error
    return Manifest.from_json(text, path)
