"""How torch's dtypes are named in manifests and kept in safetensors files."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tensorspill.errors import CorruptError, UnsupportedError

__all__ = ["Kept", "dtype_of", "kept_as", "name_of"]


class Kept(NamedTuple):
    """What a dtype is called in a safetensors file.

    Attributes
    ----------
    name : str
        Of the library's own names.
    parts : int
        Elements of that type for one of ours; more than one makes a last dimension of that size.
    exact : bool
        Whether any reader gives back our dtype; if not, the file's metadata tells it.
    """

    name: str
    parts: int = 1
    exact: bool = True


_EXACT = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

# What not every release of safetensors can read, or none.
_MAPPED = {
    torch.complex32: Kept("F16", 2, exact=False),
    torch.complex64: Kept("F32", 2, exact=False),
    torch.complex128: Kept("F64", 2, exact=False),
    torch.float8_e4m3fnuz: Kept("U8", exact=False),
    torch.float8_e5m2fnuz: Kept("U8", exact=False),
    torch.float8_e8m0fnu: Kept("U8", exact=False),
    torch.float4_e2m1fn_x2: Kept("U8", exact=False),
}

_KEPT = {dtype: Kept(name) for dtype, name in _EXACT.items()} | _MAPPED
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _KEPT}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in manifests, such as "bfloat16".

    Raises
    ------
    UnsupportedError
        Tensors of this dtype can't be kept.
    """
    try:
        return _NAMES[dtype]
    except KeyError:
        raise UnsupportedError(f"Tensors of {dtype} can't be kept in a checkpoint") from None


def dtype_of(name: object) -> torch.dtype:
    """Return the dtype of a name from a manifest.

    Raises
    ------
    CorruptError
        There is no such name.
    """
    found = _DTYPES.get(name) if isinstance(name, str) else None
    if found is None:
        raise CorruptError(f"{name!r} is no dtype of tensors in checkpoints")
    return found


def kept_as(dtype: torch.dtype) -> Kept:
    """Return how tensors of a dtype are kept; raises as `name_of` does."""
    found = _KEPT.get(dtype)
    if found is None:
        name_of(dtype)
        raise AssertionError("unreachable")
    return found
