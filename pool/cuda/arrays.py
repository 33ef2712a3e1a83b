"""The memory of CUDA arrays of any library, read by libraries and not by hand."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from tensorspill.errors import UnsupportedError

__all__ = ["ArrayMemory", "is_plain", "memory_of"]


class ArrayMemory(NamedTuple):
    """Contiguous GPU memory of an array.

    Attributes
    ----------
    address, nbytes : int
        The range; both 0 for an array without elements.
    read_only : bool
        Whether its owner forbids writing.
    device : torch.device
        With its number.
    owner : object
        Keeps the memory alive.
    """

    address: int
    nbytes: int
    read_only: bool
    device: torch.device
    owner: Any


def memory_of(array: Any) -> ArrayMemory:
    """Return the memory of a CUDA array; no stream is waited for.

    Parameters
    ----------
    array : torch.Tensor, CuPy or numba array, or with ``__cuda_array_interface__`` or DLPack
        On a GPU, contiguous, of any dtype: bfloat16 and the float8 types too.

    Raises
    ------
    UnsupportedError
        It is on no GPU, not contiguous, was freed, or has no such interface.
    """
    if isinstance(array, torch.Tensor):
        return _of_tensor(array)
    try:
        view = _view(array)
        shape, strides = view.shape, view.strides
        nbytes, address, read_only = view.size * view.dtype.itemsize, view.ptr, view.readonly
        index = view.device_id
    except Exception as error:
        # A NotImplementedError, TypeError or BufferError of cuda.core or of who made the array.
        tensor = _by_torch(array)
        if tensor is None:
            raise UnsupportedError(
                f"A {type(array).__name__} has no usable GPU memory: {error}"
            ) from error
        return _of_tensor(tensor)
    if nbytes == 0:
        return ArrayMemory(0, 0, False, torch.device("cuda", max(index, 0)), array)
    if index < 0:
        raise UnsupportedError(f"The {type(array).__name__} is in host memory, not on a GPU")
    if strides is not None and not _contiguous(shape, strides):
        raise UnsupportedError("The array is not contiguous", remedy="Use a contiguous copy")
    return ArrayMemory(address, nbytes, bool(read_only), torch.device("cuda", index), array)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor's bytes are its values, in order; those of a lazy conjugate are not."""
    return (
        tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not (tensor.is_conj() or tensor.is_neg())
    )


def _of_tensor(tensor: torch.Tensor) -> ArrayMemory:
    if tensor.device.type != "cuda":
        raise UnsupportedError(f"The tensor is on {tensor.device}, not on a GPU")
    if not is_plain(tensor):
        raise UnsupportedError("The tensor is not contiguous, or its bytes are not its values")
    # The storage, not the tensor: `parameter.data = other` must not free memory in flight.
    storage = tensor.untyped_storage()
    return ArrayMemory(tensor.data_ptr(), tensor.nbytes, False, tensor.device, storage)


def _view(array: Any) -> Any:
    """Return cuda.core's view; the older protocol first, which says whether memory is read-only."""
    try:
        from cuda.core.utils import StridedMemoryView
    except ImportError as error:
        raise UnsupportedError("cuda-python is not installed") from error
    if hasattr(array, "__cuda_array_interface__"):
        return StridedMemoryView.from_cuda_array_interface(array, stream_ptr=-1)
    return StridedMemoryView.from_dlpack(array, stream_ptr=-1)


def _by_torch(array: Any) -> torch.Tensor | None:
    """Return the array as a tensor, for dtypes that torch knows and cuda.core does not."""
    if not hasattr(array, "__dlpack__") or not torch.cuda.is_available():
        return None
    try:
        return torch.utils.dlpack.from_dlpack(array)
    except (RuntimeError, TypeError, BufferError, ValueError):
        return None


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides, in elements, are those of values in order."""
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True
