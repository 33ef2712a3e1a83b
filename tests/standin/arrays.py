"""In a process of a lane: device memory, made and looked at through cuda-python."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

__all__ = ["CudaError", "DeviceArray", "call", "on_device", "use_device"]

_lock = threading.Lock()
_contexts: dict[int, Any] = {}


class CudaError(RuntimeError):
    """The driver refused; the message is the code's name."""


def call(name: str, *arguments: Any) -> Any:
    """Call the driver; return what it gives besides the code: nothing, one value, or a tuple."""
    from cuda.bindings import driver

    code, *values = getattr(driver, name)(*arguments)
    if code != driver.CUresult.CUDA_SUCCESS:
        raise CudaError(f"{name}: {code.name}")
    return values[0] if len(values) == 1 else tuple(values) or None


def use_device(device: int = 0) -> None:
    """Make a device's primary context current in this thread, from now on."""
    call("cuCtxSetCurrent", _context(device))


@contextlib.contextmanager
def on_device(device: int = 0) -> Iterator[None]:
    """Make a device's primary context current in this thread, for a while."""
    call("cuCtxPushCurrent", _context(device))
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def _context(device: int) -> Any:
    with _lock:
        if device not in _contexts:
            call("cuInit", 0)
            _contexts[device] = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device))
    return _contexts[device]


class DeviceArray:
    """Bytes on a device, seen through ``__cuda_array_interface__``.

    Leaves no context current, so that code under test has to see to its own. A slice is a view that
    keeps the memory alive. Memory is freed with the last view, or by `free`.

    Parameters
    ----------
    nbytes : int
        At least 1.
    device : int
    managed : bool
        Memory that host and devices share.
    """

    def __init__(self, nbytes: int, device: int = 0, *, managed: bool = False) -> None:
        self._memory = _Memory(nbytes, device, managed)
        self.address: int = self._memory.address
        self.nbytes = nbytes
        self.read_only = False
        self.strides: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return self.nbytes

    def __getitem__(self, key: slice) -> Self:
        start, stop, step = key.indices(self.nbytes)
        view = type(self).__new__(type(self))
        view._memory = self._memory
        view.address = self.address + start
        view.nbytes = len(range(start, stop, step))
        view.read_only = self.read_only
        view.strides = None if step == 1 else (step,)
        return view

    @property
    def device(self) -> int:
        """Which device the memory is on."""
        return self._memory.device

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": (self.nbytes,),
            "typestr": "|u1",
            "data": (self.address, self.read_only),
            "strides": self.strides,
        }

    def around(self, nbytes: int) -> Self:
        """Return a view that starts `nbytes` before this one, and ends as much behind it."""
        view = self[:]
        view.address -= nbytes
        view.nbytes += 2 * nbytes
        return view

    def store(self, content: NDArray[np.uint8]) -> None:
        """Copy bytes of the host into the memory, and wait for that."""
        content = np.ascontiguousarray(content)
        if content.nbytes != self.nbytes:
            raise ValueError(f"{content.nbytes} bytes for {self.nbytes}")
        with on_device(self.device):
            call("cuMemcpyHtoD", self.address, content.ctypes.data, self.nbytes)

    def load(self) -> NDArray[np.uint8]:
        """Return a copy of the bytes."""
        content = np.empty(self.nbytes, np.uint8)
        with on_device(self.device):
            call("cuMemcpyDtoH", content.ctypes.data, self.address, self.nbytes)
        return content

    def free(self) -> None:
        """Free the memory, whoever still has a view of it."""
        self._memory.free()


class _Memory:
    """One allocation; freed when dropped."""

    def __init__(self, nbytes: int, device: int, managed: bool) -> None:
        self.device = device
        self.address = 0
        attach = 1  # CU_MEM_ATTACH_GLOBAL
        with on_device(device):
            self.address = int(
                call("cuMemAllocManaged", nbytes, attach) if managed else call("cuMemAlloc", nbytes)
            )

    def free(self) -> None:
        address, self.address = self.address, 0
        if address:
            with on_device(self.device):
                call("cuMemFree", address)

    def __del__(self) -> None:
        try:
            self.free()
        except (CudaError, ImportError, TypeError):
            # The interpreter or the driver is going down, or this is a forked child.
            pass
