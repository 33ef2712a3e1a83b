"""The CUDA driver, through cuda-python: loaded at the first call, its codes turned into errors."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from dataclasses import dataclass
from typing import Any

from tensorspill.errors import (
    BrokenError,
    CapacityError,
    ClosedError,
    SpillError,
    UnsupportedError,
)

__all__ = ["call", "check_process", "error_for", "status", "version", "why_not"]

_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Loaded:
    """cuda-python's driver module, initialised in process `pid`; or why there is none."""

    module: Any
    why: str | None
    pid: int


_loaded: _Loaded | None = None

#: What the caller asked for can't be done, and would work with other arguments or elsewhere.
_REFUSED = frozenset(
    f"CUDA_ERROR_{name}"
    for name in (
        "HOST_MEMORY_ALREADY_REGISTERED",
        "HOST_MEMORY_NOT_REGISTERED",
        "INVALID_CONTEXT",
        "INVALID_DEVICE",
        "INVALID_HANDLE",
        "INVALID_VALUE",
        "NOT_FOUND",
        "NOT_PERMITTED",
        "NOT_SUPPORTED",
        "STREAM_CAPTURE_UNSUPPORTED",
    )
)

#: Errors after which the context is of no use any more.
_FATAL_REMEDY = "See the kernel's log for NVRM messages; the process has to be started again"


def why_not() -> str | None:
    """Return why CUDA can't be used here, in one sentence, or None if it can.

    Loads and initialises the driver; makes no context.
    """
    loaded = _load()
    if loaded.why is None and loaded.pid != os.getpid():
        return "CUDA was initialised before this process was forked"
    return loaded.why


def check_process() -> None:
    """Raise `ClosedError` in a forked child of a process that had initialised CUDA."""
    if _loaded is not None and _loaded.why is None and _loaded.pid != os.getpid():
        raise ClosedError(
            "CUDA was initialised before this process was forked",
            remedy='Start processes with the "spawn" or "forkserver" method',
        )


def version() -> int:
    """Return the newest CUDA version that the driver supports, such as 13000.

    Raises
    ------
    UnsupportedError
        There is no driver.
    """
    return int(call("cuDriverGetVersion"))


def call(name: str, *arguments: Any) -> Any:
    """Call a function of the driver by its C name.

    Returns
    -------
    object
        None, the value, or the tuple of values that it gives.

    Raises
    ------
    UnsupportedError
        There is no driver, GPU or cuda-python here, or the driver refuses these arguments.
    CapacityError
        There is no memory for it.
    BrokenError
        The driver or the GPU failed.
    ClosedError
        This is a forked child.
    """
    code, value = status(name, *arguments)
    if code is not None:
        raise error_for(name, code)
    return value


def status(name: str, *arguments: Any) -> tuple[str | None, Any]:
    """Do the same, but return the name of the error code, or None, and the value.

    For callers to whom a code is an answer, such as ``CUDA_ERROR_NOT_READY``.
    """
    loaded = _loaded
    if loaded is None or loaded.why is not None:
        loaded = _load()
        if loaded.why is not None:
            raise UnsupportedError(loaded.why)
    if loaded.pid != os.getpid():
        check_process()
    function = getattr(loaded.module, name, None)
    if function is None:
        raise UnsupportedError(f"This cuda-python has no {name}", remedy="Install a newer one")
    try:
        code, *values = function(*arguments)
    except RuntimeError as error:  # the driver library is older than the function
        raise UnsupportedError(f"{name}: {error}") from error
    value = values[0] if len(values) == 1 else tuple(values) or None
    return (getattr(code, "name", str(code)) if int(code) else None), value


def error_for(name: str, code: str) -> SpillError:
    """Return the error for a driver function's code, such as ``CUDA_ERROR_INVALID_VALUE``."""
    message = f"{name} failed with {code}"
    if code == "CUDA_ERROR_OUT_OF_MEMORY":
        return CapacityError(message, remedy="Free GPU memory, or ask for less")
    if code in _REFUSED:
        return UnsupportedError(message)
    return BrokenError(message, remedy=_FATAL_REMEDY)


def _load() -> _Loaded:
    global _loaded
    with _lock:
        if _loaded is None:
            _loaded = _initialise()
        return _loaded


def _initialise() -> _Loaded:
    module, why = None, None
    try:
        ctypes.CDLL("libcuda.so.1")
        module = importlib.import_module("cuda.bindings.driver")
        code = module.cuInit(0)[0]
        if int(code) or (code := module.cuDeviceGetCount()[0]):
            why = f"The CUDA driver has no GPU to use: {code.name}"
        elif int(module.cuDeviceGetCount()[1]) == 0:
            why = "The CUDA driver sees no GPU"
    except OSError:
        why = "No CUDA driver (libcuda.so.1)"
    except ImportError:
        why = "cuda-python is not installed"
    except RuntimeError as error:
        why = f"The CUDA driver can't be used: {error}"
    return _Loaded(module, why, os.getpid())
