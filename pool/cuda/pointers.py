"""What the driver knows about an address."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from tensorspill.pool.cuda.driver import call, status

__all__ = ["Kind", "PointerInfo", "describe"]

Kind = Literal["device", "managed", "page-locked", "unknown"]

#: CU_MEMORYTYPE_HOST and CU_MEMORYTYPE_DEVICE.
_KINDS: dict[int, Kind] = {1: "page-locked", 2: "device"}

_NAMES = ("MEMORY_TYPE", "DEVICE_ORDINAL", "IS_MANAGED", "RANGE_START_ADDR", "RANGE_SIZE")


@dataclass(frozen=True, slots=True)
class PointerInfo:
    """An address, as the driver sees it.

    Attributes
    ----------
    kind : {"device", "managed", "page-locked", "unknown"}
        "unknown" is ordinary host memory, and what was freed.
    device : int
        Number of the GPU that it belongs to; -1 if unknown.
    base, nbytes : int
        The allocation that it lies in; 0 if unknown.
    """

    kind: Kind
    device: int = -1
    base: int = 0
    nbytes: int = 0


_UNKNOWN = PointerInfo("unknown")


def describe(address: int) -> PointerInfo:
    """Ask the driver about an address; needs a current context.

    Raises
    ------
    UnsupportedError
        There is no driver.
    BrokenError
        The GPU failed.
    """
    code, values = status("cuPointerGetAttributes", len(_NAMES), _attributes(), address)
    if code == "CUDA_ERROR_INVALID_VALUE" or (code is None and not int(values[0] or 0)):
        return _UNKNOWN
    if code is not None:
        call("cuPointerGetAttributes", len(_NAMES), _attributes(), address)
    kind = "managed" if values[2] else _KINDS.get(int(values[0]), "unknown")
    base, nbytes = int(values[3]), int(values[4])
    if kind == "device" and nbytes == 0:
        base, nbytes = (int(value) for value in call("cuMemGetAddressRange", address))
    return PointerInfo(kind, int(values[1]), base, nbytes)


_cached: list[Any] = []


def _attributes() -> list[Any]:
    """Return cuda-python's names of what is asked for."""
    if not _cached:
        from cuda.bindings.driver import CUpointer_attribute

        _cached.extend(getattr(CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{n}") for n in _NAMES)
    return _cached
