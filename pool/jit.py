"""Compiling with numba: late, without the GIL, cached where there is a place for a cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

__all__ = ["compiled"]

Function = TypeVar("Function", bound=Callable[..., Any])

log = logging.getLogger(__name__)
_reported = False


def compiled(function: Function) -> Function:
    """Compile a kernel on first use; import modules that use this only when a kernel is needed.

    The machine code is cached beside the source or in the user's cache folder, so that a second
    process starts in milliseconds. Where neither can be written, each process compiles anew.
    """
    try:
        return cast(Function, numba.njit(function, nogil=True, cache=True))
    except RuntimeError as error:
        _report(error)
        return cast(Function, numba.njit(function, nogil=True))


def _report(error: RuntimeError) -> None:
    global _reported
    if not _reported:
        _reported = True
        log.warning(
            "No writable place to cache compiled kernels (%s): every process compiles them anew, "
            "which takes some seconds. Set NUMBA_CACHE_DIR to a writable folder",
            error,
        )
