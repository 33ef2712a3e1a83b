"""Compiling the planner's kernels with numba; import this only where a kernel is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt

__all__ = ["Array", "compiled"]

#: An array of integers, of whichever width a kernel is called with.
Array = npt.NDArray[np.integer[Any]]

Function = TypeVar("Function", bound=Callable[..., Any])


def compiled(function: Function) -> Function:
    """Compile a kernel on first use, without the GIL, and cache its machine code if possible."""
    try:
        return cast(Function, numba.njit(function, nogil=True, cache=True))
    except RuntimeError:  # no writable place for a cache
        return cast(Function, numba.njit(function, nogil=True))
