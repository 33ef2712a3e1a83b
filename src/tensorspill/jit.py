"""Compiling with numba: late, without the GIL, cached where there is a place for a cache.

numba's own cache notices when the file of a function changes, but not when a function it calls,
or a table layout it was compiled for, changes in another file. Machine code for yesterday's layout
would write to the wrong place, so the cache has a folder for each state of the sources.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core.caching import FunctionCache

__all__ = ["cache_folder", "compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger(__name__)

#: Folders with kernels, or with the layouts that kernels are compiled for. Those of the planner
#: share nothing with the others.
_HOST = ("engine", "host_fallback", "pool")
_PLANNER = ("topology/solver",)
_deciding = threading.Lock()


def compiled(function: Function) -> Function:
    """Compile a kernel on first use; import modules that use this only when a kernel is needed.

    A second process loads the machine code from `cache_folder` in milliseconds. Where there is
    none, each process compiles anew, and a warning says so once.
    """
    planner = function.__module__.startswith("tensorspill.topology.")
    folder = cache_folder(_PLANNER if planner else _HOST)
    if folder is None:
        return cast(Function, numba.njit(function, nogil=True))
    dispatcher = numba.njit(function, nogil=True)
    with _deciding:
        before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, folder
        try:
            # What ``cache=True`` does, with a cache that may fail.
            dispatcher._cache = _Cache(function)
        finally:
            numba.config.CACHE_DIR = before
    return cast(Function, dispatcher)


class _Cache(FunctionCache):  # type: ignore[misc]
    """numba's cache, whose want of room or rights is not the caller's error."""

    def save_overload(self, sig: Any, data: Any) -> None:
        """Save machine code, or log why not."""
        try:
            super().save_overload(sig, data)
        except OSError as error:
            log.warning("A compiled kernel could not be cached: %s", error)


def cache_folder(sources: tuple[str, ...] = _HOST) -> str | None:
    """Return the folder for machine code of some sources, or None if no place is writable.

    It is below ``NUMBA_CACHE_DIR`` if that is set, else beside the sources, else below the user's
    cache folder.
    """
    place = _place()
    if place is None:
        return None
    folder = os.path.join(place, f"tensorspill-{_fingerprint(sources)}")
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
    except OSError as error:
        log.warning("Compiled kernels can't be cached: %s", error)
        return None
    return folder


@functools.cache
def _place() -> str | None:
    for place in _places():
        try:
            os.makedirs(place, mode=0o700, exist_ok=True)
            tempfile.TemporaryFile(dir=place).close()
        except OSError:
            continue
        return place
    log.warning(
        "No writable place to cache compiled kernels: every process compiles them anew, which "
        "takes some seconds. Set NUMBA_CACHE_DIR to a writable folder"
    )
    return None


def _places() -> Iterator[str]:
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        yield chosen
        return
    yield os.path.join(os.path.dirname(os.path.realpath(__file__)), "__pycache__")
    yield os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")


@functools.cache
def _fingerprint(sources: tuple[str, ...]) -> str:
    """Return a digest of all sources that compiled code depends on."""
    package = Path(__file__).parent
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(path for name in sources for path in (package / name).glob("*.py")):
        digest.update(source.name.encode() + source.read_bytes())
    return digest.hexdigest()
