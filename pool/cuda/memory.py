"""A slab of GPU memory, from the driver or from CuPy's pool."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Any, Literal, Self

import torch

from tensorspill.errors import ClosedError, SpillError, UnsupportedError
from tensorspill.pool.cuda.contexts import current, normal_device
from tensorspill.pool.cuda.driver import call
from tensorspill.pool.shapes import array_interface
from tensorspill.pool.sizes import format_bytes

__all__ = ["DevicePart", "DeviceSlab", "Resource", "is_owned", "set_freeing"]

Resource = Literal["driver", "cupy"]

#: What the driver aligns allocations to.
_ALIGNMENT = 256

_owned: dict[int, int] = {}


def _at_once(_: int, give_back: Callable[[], None]) -> None:
    give_back()


_freeing: Callable[[int, Callable[[], None]], None] = _at_once


def is_owned(address: int) -> bool:
    """Whether an allocation that begins at `address` is one of ours, freed by us alone."""
    return address in _owned


def set_freeing(freeing: Callable[[int, Callable[[], None]], None]) -> None:
    """Have our allocations freed by ``freeing(address, give_back)`` from now on.

    It may be called by the garbage collector, anywhere, and calls ``give_back()`` once.
    """
    global _freeing
    _freeing = freeing


class DeviceMemory:
    """An allocation of a GPU, freed when nothing refers to it any more.

    Parameters
    ----------
    nbytes : int
        At least 1.
    device : int
        Number of the GPU.
    resource : {"driver", "cupy"}
        ``cuMemAlloc``, or the memory pool that CuPy's arrays come from.

    Raises
    ------
    CapacityError
        The GPU has no such memory.
    UnsupportedError
        There is no driver, or CuPy is not installed.
    """

    def __init__(self, nbytes: int, device: int, resource: Resource) -> None:
        self.nbytes = nbytes
        self.device = device
        take = _from_cupy if resource == "cupy" else _from_driver
        with current(device):
            self.address, give_back = take(nbytes, device)
        _owned[self.address] = nbytes
        self._end = weakref.finalize(self, _free, self.address, device, os.getpid(), give_back)
        # At exit the driver frees everything itself, and cuFile must not be called any more.
        self._end.atexit = False


class DevicePart:
    """A range of a slab, which keeps the whole allocation."""

    __slots__ = ("__weakref__", "_memory", "address", "nbytes")

    def __init__(self, memory: DeviceMemory, offset: int, nbytes: int) -> None:
        self._memory = memory
        self.address = memory.address + offset
        self.nbytes = nbytes

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The range as bytes."""
        return array_interface(self.address, (self.nbytes,), torch.uint8)


class DeviceSlab:
    """GPU memory that lives until the slab, its tensors and its arrays are gone.

    Parameters
    ----------
    nbytes : int
        Size.
    device : str or torch.device
        Which GPU; "cuda" is the one that torch means by it.
    resource : {"driver", "cupy"}
        See `DeviceMemory`.
    alignment : int
        Least power of two that the address is a multiple of, at most 2 MiB.

    Attributes
    ----------
    address, nbytes : int
        The range.
    device : torch.device
        The GPU, with its number.
    page_locked : bool
        False: that is for host memory.
    notes : tuple of str
        Empty.

    Raises
    ------
    CapacityError
        The GPU has no such memory.
    UnsupportedError
        There is no such GPU, or an argument is out of range.
    """

    page_locked = False
    notes: tuple[str, ...] = ()

    def __init__(
        self,
        nbytes: int,
        device: str | torch.device = "cuda",
        resource: Resource = "driver",
        *,
        alignment: int = _ALIGNMENT,
    ) -> None:
        if nbytes < 0:
            raise UnsupportedError(f"A slab can't have {nbytes} bytes")
        if resource not in ("driver", "cupy"):
            raise UnsupportedError(f"resource is driver or cupy, not {resource!r}")
        self.device = normal_device(device)
        self.nbytes = nbytes
        room = max(nbytes, 1) + (alignment if alignment > _ALIGNMENT else 0)
        memory = DeviceMemory(room, self.device.index, resource)
        self._lead = -memory.address % alignment
        self.address = memory.address + self._lead
        self._memory: DeviceMemory | None = memory

    def part(self, offset: int, nbytes: int) -> DevicePart:
        """Return a range of the memory, which keeps it allocated.

        Raises
        ------
        ClosedError
            The slab was closed.
        """
        if self._memory is None:
            raise ClosedError("The slab is closed")
        return DevicePart(self._memory, self._lead + offset, nbytes)

    def shaped(self, part: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """Return a tensor over exactly a `part`, whose storage holds it; None without CUDA's torch.

        Raises
        ------
        UnsupportedError
            torch can't view bytes as this dtype.
        """
        try:
            # Views of a dtype that no tensor can have fail on the CPU just as well.
            torch.empty(dtype.itemsize, dtype=torch.uint8).view(dtype)
            if not torch.cuda.is_available():
                return None
            if part.nbytes == 0:
                return torch.empty(shape, dtype=dtype, device=self.device)
            return torch.as_tensor(part, device=self.device).view(dtype).view(shape)
        except (RuntimeError, TypeError) as error:
            raise UnsupportedError(f"No buffers of {dtype}: {error}") from error

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set `nbytes` from `offset` on to `value`, after all that uses the default stream."""
        part = self.part(offset, nbytes)
        if nbytes:
            with current(self.device.index):
                call("cuMemsetD8", part.address, value, nbytes)
                call("cuStreamSynchronize", 0)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._memory is None

    def close(self) -> None:
        """Give the memory up; it is freed when no tensor and no array uses it any more."""
        self._memory = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else str(self.device)
        return f"<DeviceSlab {format_bytes(self.nbytes)} at {self.address:#x}, {state}>"


def _from_driver(nbytes: int, _: int) -> tuple[int, Callable[[], None]]:
    address = int(call("cuMemAlloc", nbytes))
    return address, lambda: call("cuMemFree", address)


def _from_cupy(nbytes: int, device: int) -> tuple[int, Callable[[], None]]:
    try:
        import cupy
    except ImportError as error:
        raise UnsupportedError("CuPy is not installed", remedy='Use resource="driver"') from error
    with cupy.cuda.Device(device):
        held = [cupy.get_default_memory_pool().malloc(nbytes)]
    return int(held[0].ptr), held.clear


def _free(address: int, device: int, pid: int, give_back: Callable[[], None]) -> None:
    if os.getpid() != pid:
        return  # A forked child; the parent has the memory.
    _freeing(address, partial(_give_back, address, device, give_back))


def _give_back(address: int, device: int, give_back: Callable[[], None]) -> None:
    _owned.pop(address, None)
    try:
        with current(device):
            give_back()
    except SpillError:
        pass  # The driver is being torn down, or the GPU failed; nobody is there to be told.
