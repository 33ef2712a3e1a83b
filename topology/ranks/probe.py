"""How fast a folder can be written, by a short measurement whose result is kept."""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tensorspill.errors import BrokenError, NoSpaceError
from tensorspill.topology.discovery import device_of

__all__ = ["measured_write_mbps", "probe_write_mbps"]

log = logging.getLogger(__name__)

_CHUNK = 4 << 20
_THREADS = 4


def probe_write_mbps(
    folder: str | os.PathLike[str], *, nbytes: int = 256 << 20, seconds: float = 1.0
) -> int:
    """Write a file without a name, and return at how many MB/s that went, at least 1.

    The page cache is avoided where the file system allows it; the file is flushed to the drive
    before the clock is stopped, and never more than `nbytes` long.

    Parameters
    ----------
    folder : path-like
        Where to write.
    nbytes : int
        How much to write.
    seconds : float
        When to stop earlier.

    Raises
    ------
    NoSpaceError
        Less than twice `nbytes` are free.
    BrokenError
        The folder can't be written.
    """
    try:
        state = os.statvfs(folder)
        free = state.f_bavail * state.f_frsize
        if free < 2 * nbytes:
            full = NoSpaceError("Too little is free to measure a drive", path=folder, nbytes=nbytes)
            raise full.with_free(free)
        return _write(_nameless(folder), nbytes, seconds)
    except BrokenError:
        raise
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't measure a folder", path=folder) from error


def _nameless(folder: str | os.PathLike[str]) -> int:
    """Return a descriptor of a new file that has no name."""
    for flags in (os.O_TMPFILE | os.O_DIRECT, os.O_TMPFILE):
        try:
            return os.open(folder, flags | os.O_RDWR, 0o600)
        except OSError as error:
            log.debug("No nameless file in %s with flags %#x: %s", folder, flags, error)
    descriptor, path = tempfile.mkstemp(dir=folder)
    os.unlink(path)
    return descriptor


def _write(descriptor: int, nbytes: int, seconds: float) -> int:
    with mmap.mmap(-1, _CHUNK) as buffer, ThreadPoolExecutor(_THREADS) as pool:
        try:
            buffer[:] = os.urandom(1 << 16) * (_CHUNK >> 16)
            begun = time.perf_counter()

            def write(offset: int) -> int:
                late = time.perf_counter() - begun > seconds
                return 0 if late else os.pwrite(descriptor, buffer, offset)

            written = sum(pool.map(write, range(0, max(nbytes, _CHUNK), _CHUNK)))
            os.fdatasync(descriptor)
            return max(1, round(written / (time.perf_counter() - begun) / 1e6))
        finally:
            os.close(descriptor)


def measured_write_mbps(
    folder: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None
) -> int:
    """Return what `probe_write_mbps` found for the folder's drives, now or at an earlier time.

    Parameters
    ----------
    folder : path-like
        Where to write.
    cache : path-like, optional
        File that keeps what was measured on each host and device; by default
        ``tensorspill/capacities.json`` in the user's cache folder. If it can't be read it counts as
        empty, and if it can't be written nothing is kept.
    """
    file = Path(cache) if cache is not None else _default_cache()
    where = device_of(folder)
    key = f"{socket.gethostname()}:{where.device or where.mount or where.path}"
    known = _read(file)
    if key not in known:
        known[key] = probe_write_mbps(folder)
        _store(file, {**_read(file), key: known[key]})
    return known[key]


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "tensorspill" / "capacities.json"


def _read(file: Path) -> dict[str, int]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(value, dict):
        return {}
    return {key: rate for key, rate in value.items() if type(rate) is int and rate >= 1}


def _store(file: Path, value: dict[str, int]) -> None:
    """Replace the cache at once, so that others never read half of it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor, path = tempfile.mkstemp(dir=file.parent)
        with os.fdopen(descriptor, "w", encoding="utf-8") as out:
            json.dump(value, out, sort_keys=True)
        os.replace(path, file)
    except OSError as error:
        log.warning("Can't keep the capacity measured, in %s: %s", file, error)
