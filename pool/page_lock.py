"""Page-locking host memory for a GPU's copy engines, through cuda-python.

Nothing here touches CUDA until `PageLock` is called.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tensorspill.errors import UnsupportedError

__all__ = ["PageLock"]

#: CU_MEMHOSTREGISTER_PORTABLE: page-locked for all contexts, not only for the one that registers.
_PORTABLE = 1


class PageLock:
    """Host memory registered with the CUDA driver, until `release`.

    Parameters
    ----------
    memory : ndarray
        A range that begins at a page. Held until `release`, so that it stays mapped.

    Raises
    ------
    UnsupportedError
        There is no driver, no GPU or no cuda-python, or the driver refuses; nothing is held.
    """

    def __init__(self, memory: NDArray[np.uint8]) -> None:
        self._memory: NDArray[np.uint8] | None = None
        self._address = memory.ctypes.data
        self._pid = os.getpid()
        self._driver = _load_driver()
        self._device: Any = None
        try:
            with self._context():
                _call(self._driver, "cuMemHostRegister", self._address, memory.nbytes, _PORTABLE)
        except UnsupportedError:
            self._release_context()
            raise
        self._memory = memory

    def release(self) -> None:
        """Unregister the memory; a second time, or in a forked child, does nothing."""
        memory, self._memory = self._memory, None
        if memory is None or os.getpid() != self._pid:
            return
        try:
            with self._context():
                _call(self._driver, "cuMemHostUnregister", self._address)
        except UnsupportedError:
            pass  # The driver is being torn down and has let go of the memory already.
        self._release_context()

    @contextmanager
    def _context(self) -> Iterator[None]:
        """Use the thread's context, else the primary one of this rank's own GPU."""
        driver = self._driver
        if int(_call(driver, "cuCtxGetCurrent")):
            yield
            return
        if self._device is None:
            self._retain_context()
        _call(driver, "cuCtxPushCurrent", self._primary)
        try:
            yield
        finally:
            _call(driver, "cuCtxPopCurrent")

    def _retain_context(self) -> None:
        driver = self._driver
        count = int(_call(driver, "cuDeviceGetCount"))
        if count == 0:
            raise UnsupportedError("Not page-locked: the CUDA driver sees no GPU")
        # Every rank on GPU 0 would cost its memory once for each rank.
        device = _call(driver, "cuDeviceGet", _local_rank() % count)
        self._primary = _call(driver, "cuDevicePrimaryCtxRetain", device)
        self._device = device

    def _release_context(self) -> None:
        device, self._device = self._device, None
        if device is not None:
            self._driver.cuDevicePrimaryCtxRelease(device)


def _local_rank() -> int:
    rank = os.environ.get("LOCAL_RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _load_driver() -> Any:
    """Return cuda-python's driver module, with the driver initialised."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise UnsupportedError("Not page-locked: no CUDA driver (libcuda.so.1)") from error
    for name in ("cuda.bindings.driver", "cuda.cuda"):
        try:
            driver = importlib.import_module(name)
        except ImportError:
            continue
        _call(driver, "cuInit", 0)
        return driver
    raise UnsupportedError("Not page-locked: cuda-python is not installed")


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    """Call a driver function; return its value, or raise `UnsupportedError` with its code."""
    try:
        code, *values = getattr(driver, name)(*arguments)
    except RuntimeError as error:
        raise UnsupportedError(f"Not page-locked: {name}: {error}") from error
    if int(code):
        raise UnsupportedError(f"Not page-locked: {name}: {getattr(code, 'name', code)}")
    return values[0] if values else None
