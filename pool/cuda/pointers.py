"""What the driver knows about an address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tensorspill.pool.cuda.driver import call, status

__all__ = ["Kind", "PointerInfo", "describe", "first_unusable"]

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


def first_unusable(
    addresses: Sequence[int], sizes: Sequence[int], device: int
) -> tuple[int, str] | None:
    """Find a range that is not ordinary memory of a GPU; needs a current context.

    The driver is asked once for each allocation, of which many small tensors share one.

    Returns
    -------
    tuple of (int, str), or None
        Which range it is, and why it can't be used.
    """
    known_to = 0
    for i in sorted(range(len(addresses)), key=addresses.__getitem__):
        at, end = max(addresses[i], known_to), addresses[i] + sizes[i]
        while at < end:
            info = describe(at)
            if info.kind != "device" or info.device != device:
                return i, _why_unusable(info, device)
            # Memory that was mapped piece by piece is several allocations in a row.
            at = known_to = max(info.base + info.nbytes, at + 1)
    return None


def _why_unusable(info: PointerInfo, device: int) -> str:
    if info.kind == "unknown":
        return "The buffer's address is not in GPU memory; perhaps it was freed"
    if info.kind == "managed":
        return "The buffer is managed memory, which the driver moves between GPU and host"
    if info.kind == "page-locked":
        return "The buffer is page-locked host memory, not GPU memory"
    return f"The buffer is on cuda:{info.device}, this engine serves cuda:{device}"


_cached: list[Any] = []


def _attributes() -> list[Any]:
    """Return cuda-python's names of what is asked for."""
    if not _cached:
        from cuda.bindings.driver import CUpointer_attribute

        _cached.extend(getattr(CUpointer_attribute, f"CU_POINTER_ATTRIBUTE_{n}") for n in _NAMES)
    return _cached
