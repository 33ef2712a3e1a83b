"""Files to measure with: written once, so that no run pays for the first touch of their blocks."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import numpy as np

from tensorspill.errors import CorruptError

__all__ = ["check_written", "prewrite", "written_file"]

_CHUNK = 8 << 20


def written_file(path: Path, nbytes: int) -> Path:
    """Make a file of `nbytes`, preallocated and then written."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if nbytes:
            os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)
    prewrite(path)
    return path


def prewrite(path: str | os.PathLike[str]) -> None:
    """Write all blocks of a file once, past the page cache where that is possible."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        fd = os.open(path, os.O_WRONLY)
    try:
        size = os.fstat(fd).st_size
        whole = size // _CHUNK * _CHUNK
        with mmap.mmap(-1, _CHUNK) as chunk:
            chunk[:] = os.urandom(_CHUNK)
            for offset in range(0, whole, _CHUNK):
                os.pwrite(fd, chunk, offset)
        if size > whole:
            _write_rest(path, whole, size - whole)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def check_written(
    path: Path,
    content: np.ndarray[tuple[int], np.dtype[np.uint8]],
    offset: int = 0,
    places: int = 64,
) -> None:
    """Read some places of a file by another way and compare them with what was written.

    Raises
    ------
    CorruptError
        They differ.
    """
    step = max(1, len(content) // places)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for at in range(0, len(content), step):
            expected = content[at : at + 4096].tobytes()
            if os.pread(file.fileno(), len(expected), offset + at) != expected:
                raise CorruptError(
                    "The file does not hold what was written",
                    path=path,
                    offset=offset + at,
                    nbytes=len(expected),
                )
        # Or the next run would have to drop them.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _write_rest(path: str | os.PathLike[str], offset: int, nbytes: int) -> None:
    fd = os.open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, os.urandom(nbytes), offset)
    finally:
        os.close(fd)
