"""The primary contexts of the GPUs in use, and nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.cuda.driver import call, check_process

__all__ = ["count", "current", "normal_device", "retained"]

_lock = threading.Lock()
_retained: dict[int, Any] = {}


def count() -> int:
    """Return how many GPUs the driver shows to this process.

    Raises
    ------
    UnsupportedError
        There is no driver.
    """
    return int(call("cuDeviceGetCount"))


def normal_device(device: str | torch.device) -> torch.device:
    """Return a CUDA device with its number; without one, the device that torch means by "cuda".

    Raises
    ------
    UnsupportedError
        It is no CUDA device, or there is no such GPU here.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedError(f"{device!r} is no device: {error}") from error
    if device.type != "cuda":
        raise UnsupportedError(f"{device} is no CUDA device")
    if device.index is None:
        started = torch.cuda.is_initialized()
        index = torch.cuda.current_device() if started else 0
        device = torch.device("cuda", index)
    if device.index >= count():
        raise UnsupportedError(f"There is no {device} here: the CUDA driver shows {count()} GPUs")
    return device


def retained() -> tuple[int, ...]:
    """Return the numbers of the devices whose primary context this process holds through us."""
    return tuple(sorted(_retained))


@contextmanager
def current(index: int) -> Iterator[None]:
    """Make a device's primary context, the one that torch uses, current in this thread.

    What was current before is current again afterwards. The context is retained once, at the first
    use of a device, until the process ends.

    Raises
    ------
    UnsupportedError
        There is no driver, or no such device.
    ClosedError
        This is a forked child.
    """
    context = _retained.get(index)
    if context is None:
        context = _retain(index)
    if int(call("cuCtxGetCurrent")) == int(context):
        yield
        return
    call("cuCtxPushCurrent", context)
    try:
        yield
    finally:
        call("cuCtxPopCurrent")


def _retain(index: int) -> Any:
    check_process()
    with _lock:
        if index not in _retained:
            _retained[index] = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", index))
        return _retained[index]
