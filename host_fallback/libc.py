"""C library calls inside compiled loops.

Resolved by name when machine code is loaded, so that it can be cached; no address of this process
is compiled in. Importing this module imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from tensorspill.jit import compiled

__all__ = ["at", "errno", "memcpy", "memset", "nanoseconds", "pread", "pwrite", "syscall"]

_i8, _i4 = types.int64, types.int32

#: ``syscall(number, a, b, c, d, e)``: variadic in C, but on x86-64 and AArch64 Linux integers of a
#: variadic call travel in the same registers as named ones.
syscall = types.ExternalFunction("syscall", _i8(_i8, _i8, _i8, _i8, _i8, _i8))
pread = types.ExternalFunction("pread", _i8(_i4, _i8, _i8, _i8))
pwrite = types.ExternalFunction("pwrite", _i8(_i4, _i8, _i8, _i8))
memcpy = types.ExternalFunction("memcpy", _i8(_i8, _i8, _i8))
memset = types.ExternalFunction("memset", _i8(_i8, _i4, _i8))
_errno_location = types.ExternalFunction("__errno_location", types.CPointer(_i4)())
_clock_gettime = types.ExternalFunction("clock_gettime", _i4(_i4, _i8))

_CLOCK_MONOTONIC = 1


@intrinsic  # type: ignore[untyped-decorator]
def at(typing_context: Any, address: Any) -> Any:  # noqa: ARG001 - numba's calling convention
    """Return an integer address as a pointer, for `numba.carray`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(address), generate


@compiled
def errno() -> int:
    """Return the error number that the last failed call of this thread left."""
    return int(carray(_errno_location(), 1)[0])


@compiled
def nanoseconds(scratch: np.ndarray[Any, Any]) -> int:
    """Return the monotonic clock; `scratch` is an int64 array of two elements."""
    _clock_gettime(_CLOCK_MONOTONIC, scratch.ctypes.data)
    return int(scratch[0] * 1_000_000_000 + scratch[1])
