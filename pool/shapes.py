"""Shapes and dtypes over raw memory."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.errors import UnsupportedError

__all__ = ["Shape", "count_bytes", "normal_shape", "shaped"]

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
