"""A 64-bit digest of memory, fast enough to check every tensor, on a CPU or a GPU.

Definition, over ``nbytes`` bytes, all arithmetic modulo 2**64::

    w_0, w_1, …  = the bytes as little-endian 64-bit words, the last one padded with zeros
    mix(x)       = x ^= x >> 30; x *= 0xBF58476D1CE4E5B9
                   x ^= x >> 27; x *= 0x94D049BB133111EB; x ^= x >> 31   (splitmix64's finalizer)
    S            = sum over i of mix(w_i + (i + 1) * 0x9E3779B97F4A7C15)
    digest       = mix(S + nbytes * 0xD1B54A32D192ED03)

Every word is mixed with its position and the results are added, so lanes, threads and blocks can
take words in any order. It finds what drives and software do wrong (flipped bits, swapped,
repeated, missing or stale blocks); it is no protection against someone who wants a collision.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer

__all__ = ["digest", "digest_reference", "finished"]

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
_LENGTH = 0xD1B54A32D192ED03


def digest(data: torch.Tensor | NDArray[Any] | Buffer | Any) -> int:
    """Return the digest of the raw bytes of a tensor, array, buffer or buffer-protocol object.

    Any address and any number of bytes will do. The GIL is let go while it computes. Memory of a
    GPU is read there, after what its current stream is doing; see
    `tensorspill.pool.kernels.digesting` for many tensors at a time.

    Raises
    ------
    UnsupportedError
        The data is not contiguous, on a device that is no GPU of NVIDIA's, or has no memory at all.
    ClosedError
        The buffer was released.
    """
    if _is_on_device(data):
        from tensorspill.pool.kernels.digesting import begin_digests

        return begin_digests([data]).values()[0]
    # Late, because importing numba takes a good part of a second.
    from tensorspill.pool.digest_kernels import sum_words

    raw = _bytes_of(data)
    words = raw.nbytes // 8
    total = int(sum_words(raw[: words * 8].view(np.uint64))) if words else 0
    tail = raw[words * 8 :].tobytes()
    if tail:
        total += _mix(int.from_bytes(tail, "little") + (words + 1) * _GOLDEN)
    return finished(total, raw.nbytes)


def finished(total: int, nbytes: int) -> int:
    """Return the digest of so many bytes from the sum of their mixed words, modulo 2**64."""
    return _mix(total + nbytes * _LENGTH)


def digest_reference(data: bytes) -> int:
    """Return the digest of bytes, step by step as it is defined; for tests of faster ones."""
    words = np.frombuffer(data + bytes(-len(data) % 8), "<u8")
    x = words + np.arange(1, words.size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x = x ^ (x >> np.uint64(31))
    return _mix(int(x.sum(dtype=np.uint64)) + len(data) * _LENGTH)


def _mix(x: int) -> int:
    x &= _MASK
    x = ((x ^ (x >> 30)) * _FIRST) & _MASK
    x = ((x ^ (x >> 27)) * _SECOND) & _MASK
    return x ^ (x >> 31)


def _is_on_device(data: Any) -> bool:
    """Whether data is in the memory of a GPU."""
    if isinstance(data, torch.Tensor | Buffer):
        return data.device.type == "cuda"
    return hasattr(data, "__cuda_array_interface__")


def _bytes_of(data: Any) -> NDArray[np.uint8]:
    """Return the raw memory as a 1-D array of bytes, without a copy."""
    if isinstance(data, Buffer):
        data = data.tensor
    if isinstance(data, torch.Tensor):
        if not data.is_cpu:
            raise UnsupportedError(f"No digests of memory on {data.device}")
        if not data.is_contiguous():
            raise UnsupportedError("The tensor is not contiguous")
        if data.numel() == 0:
            return np.empty(0, np.uint8)
        array: NDArray[np.uint8] = data.detach().reshape(-1).view(torch.uint8).numpy()
        return array
    try:
        array = data if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    except (TypeError, ValueError, BufferError) as error:
        if isinstance(error, ValueError) and memoryview(data).nbytes == 0:
            return np.empty(0, np.uint8)
        raise UnsupportedError(f"A {type(data).__name__} has no memory to digest") from error
    if not array.flags.c_contiguous:
        raise UnsupportedError("The array is not contiguous")
    return array.reshape(-1).view(np.uint8)
