"""Shapes and dtypes over raw memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.errors import UnsupportedError

__all__ = ["Shape", "array_interface", "bytes_at", "count_bytes", "normal_shape", "shaped"]

Shape = int | Sequence[int]


def normal_shape(shape: Shape) -> tuple[int, ...]:
    """Return a shape as a tuple of integers.

    Raises
    ------
    UnsupportedError
        It is no integer and no sequence of integers, or one of them is negative.
    """
    try:
        sizes = shape if isinstance(shape, Sequence) else (shape,)
        result = tuple(operator.index(size) for size in sizes)
    except TypeError:
        raise UnsupportedError(f"{shape!r} is no shape") from None
    if any(size < 0 for size in result):
        raise UnsupportedError(f"A shape can't be negative: {result}")
    return result


def count_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes of a contiguous tensor."""
    if not isinstance(dtype, torch.dtype):
        raise UnsupportedError(f"{dtype!r} is no torch.dtype")
    return math.prod(shape) * dtype.itemsize


def shaped(memory: NDArray[np.uint8], shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor over exactly `memory`, whose storage holds `memory`.

    Raises
    ------
    UnsupportedError
        torch can't view bytes as this dtype.
    """
    try:
        if memory.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(memory).view(dtype).view(shape)
    except (RuntimeError, TypeError) as error:
        raise UnsupportedError(f"No buffers of {dtype}: {error}") from error


#: What ``__cuda_array_interface__`` calls the dtypes that it has names for.
_TYPES = {
    torch.bool: "|b1",
    torch.int8: "|i1",
    torch.uint8: "|u1",
    torch.int16: "<i2",
    torch.uint16: "<u2",
    torch.int32: "<i4",
    torch.uint32: "<u4",
    torch.int64: "<i8",
    torch.uint64: "<u8",
    torch.float16: "<f2",
    torch.float32: "<f4",
    torch.float64: "<f8",
    torch.complex64: "<c8",
    torch.complex128: "<c16",
}


def array_interface(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the ``__cuda_array_interface__`` of contiguous GPU memory, as bytes if need be.

    It names no stream: whoever holds the memory knows what was put on which stream.
    """
    name = _TYPES.get(dtype)
    if name is None:
        name, shape = "|u1", (math.prod(shape) * dtype.itemsize,)
    return {
        "version": 3,
        "shape": shape,
        "typestr": name,
        "data": (address, False),
        "strides": None,
        "stream": None,
    }


class _Bytes:
    """GPU memory as bytes, for a call of a library; it keeps nothing alive."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__ = array_interface(address, (nbytes,), torch.uint8)


def bytes_at(address: int, nbytes: int) -> Any:
    """Return an array of bytes over GPU memory; the caller keeps that alive."""
    return _Bytes(address, nbytes)
