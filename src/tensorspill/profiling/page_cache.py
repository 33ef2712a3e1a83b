"""Which pages of a file are in the page cache: a read of cached pages measures memory."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from dataclasses import dataclass

import numpy as np

__all__ = ["CacheWatch", "PageCache", "drop_pages", "page_cache"]

#: ``cachestat`` (Linux 6.5) has one number on all architectures that this library runs on.
_CACHESTAT = 451
_ARCHITECTURES = ("x86_64", "aarch64")


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _Stat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in ("cache", "dirty", "writeback", "evicted", "recently_evicted")
    )


@dataclass(frozen=True, slots=True)
class PageCache:
    """What the page cache holds of a file.

    Attributes
    ----------
    pages, cached : int
        Pages of the file, and how many of them are cached.
    dirty : int or None
        Of these, not yet written; None if the kernel doesn't say.
    source : str
        "cachestat" or "mincore".
    """

    pages: int
    cached: int
    dirty: int | None
    source: str

    def __str__(self) -> str:
        dirty = "" if not self.dirty else f", {self.dirty} dirty"
        return f"{self.cached} of {self.pages} pages cached{dirty}"


def page_cache(path: str | os.PathLike[str]) -> PageCache:
    """Return what is cached of a file."""
    fd = os.open(path, os.O_RDONLY)
    try:
        pages = -(-os.fstat(fd).st_size // mmap.PAGESIZE)
        return _from_cachestat(fd, pages) or _from_mincore(fd, pages)
    finally:
        os.close(fd)


def drop_pages(path: str | os.PathLike[str]) -> PageCache:
    """Write back and drop a file's cached pages, as far as the kernel lets go of them."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    return page_cache(path)


class CacheWatch:
    """Remembers the most that was cached of each file before reads that should find nothing."""

    def __init__(self) -> None:
        self._most: dict[str, PageCache] = {}

    def look(self, path: str | os.PathLike[str]) -> None:
        """Look at a file now."""
        found, name = page_cache(path), os.path.basename(path)
        before = self._most.get(name)
        if before is None or found.cached > before.cached:
            self._most[name] = found

    def notes(self) -> list[str]:
        """Return a line for each file."""
        return [f"{name}: before reads, at most {most}" for name, most in self._most.items()]


def _from_cachestat(fd: int, pages: int) -> PageCache | None:
    if platform.machine() not in _ARCHITECTURES:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    stat = _Stat()
    whole = _Range(0, 0)
    number = ctypes.c_long(_CACHESTAT)
    if libc.syscall(number, fd, ctypes.byref(whole), ctypes.byref(stat), ctypes.c_uint(0)):
        return None
    return PageCache(pages, int(stat.cache), int(stat.dirty), "cachestat")


def _from_mincore(fd: int, pages: int) -> PageCache:
    if pages == 0:
        return PageCache(0, 0, None, "mincore")
    libc = ctypes.CDLL(None, use_errno=True)
    resident = np.zeros(pages, np.uint8)
    with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        address, nbytes = view.ctypes.data, view.nbytes
        del view
        failed = libc.mincore(
            ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_void_p(resident.ctypes.data)
        )
    if failed:
        raise OSError(ctypes.get_errno(), "mincore failed")
    return PageCache(pages, int((resident & 1).sum()), None, "mincore")
