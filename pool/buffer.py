"""A buffer: a range of a pool's memory, with a shape and a dtype."""

from __future__ import annotations

import math
import weakref
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from tensorspill.errors import BusyError, ClosedError, UnsupportedError
from tensorspill.pool.live import live_ranges
from tensorspill.pool.shapes import array_interface

__all__ = ["Buffer", "Memory", "Owner"]


class Memory(Protocol):
    """A range of a slab that is kept as long as something refers to it."""

    @property
    def nbytes(self) -> int:
        """Bytes of the range."""
        ...


class Owner(Protocol):
    """What a buffer needs of the pool that it is a part of."""

    closed: bool

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the pool."""
        ...

    def take_back(self, offset: int) -> None:
        """Make the range at `offset` free."""
        ...


class Buffer:
    """Memory that belongs to whoever holds the buffer, until `release`.

    Pools make buffers. One that is dropped without `release` goes back to its pool when no tensor
    uses its memory any more.

    One of GPU memory has ``__cuda_array_interface__``, so that CuPy, numba and others take it as it
    is; dtypes that the interface has no name for are shown as bytes.

    Attributes
    ----------
    shape : tuple of int
        As it was asked for.
    dtype : torch.dtype
        As it was asked for.
    nbytes : int
        Bytes of the tensor, rounding not included.
    address : int
        Where they are; 0 if there are none.
    device : torch.device
        Where the memory is.
    """

    __slots__ = (
        "__weakref__",
        "_memory",
        "_offset",
        "_owner",
        "_return",
        "_tensor",
        "address",
        "device",
        "dtype",
        "nbytes",
        "shape",
    )

    def __init__(
        self,
        memory: Memory,
        layout: tuple[tuple[int, ...], torch.dtype, torch.device],
        address: int,
        tensor: torch.Tensor | None,
        owner: Owner,
        offset: int | None,
        returning: weakref.finalize[..., Any] | None,
    ) -> None:
        self._memory: Memory | None = memory
        self._tensor = tensor
        self._owner = owner
        self._offset = offset
        self._return = returning
        self.shape, self.dtype, self.device = layout
        self.address = address
        self.nbytes = math.prod(self.shape) * self.dtype.itemsize

    @property
    def memory(self) -> Memory:
        """What keeps the bytes where they are.

        Raises
        ------
        ClosedError
            The buffer was released, or its pool closed.
        """
        memory = self._memory
        if memory is None:
            raise ClosedError("The buffer was released")
        if self._owner.closed:
            raise ClosedError("The buffer's pool is closed")
        return memory

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a tensor of the shape and dtype asked for.

        Its storage is the buffer's own range and not the whole pool. Tensors made of it must not
        be used after `release`.

        Raises
        ------
        ClosedError
            The buffer was released, or its pool closed.
        UnsupportedError
            It is GPU memory, and the torch that is installed has no CUDA.
        """
        tensor = self._tensor
        if tensor is None or self._owner.closed:
            _ = self.memory
            raise UnsupportedError(
                f"This torch has no CUDA, so there are no tensors on {self.device}",
                remedy="Use the buffer itself, or arrays that CuPy or numba make of it",
            )
        return tensor

    @property
    def has_tensor(self) -> bool:
        """Whether `tensor` works: torch has to have CUDA for GPU memory."""
        return self._tensor is not None

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """The memory for other libraries; only of GPU memory."""
        if self.device.type != "cuda":
            raise AttributeError(f"A buffer on {self.device} has no __cuda_array_interface__")
        _ = self.memory
        return array_interface(self.address, self.shape, self.dtype)

    @property
    def released(self) -> bool:
        """Whether the buffer was released, or its pool closed."""
        return self._memory is None or self._owner.closed

    def release(self) -> None:
        """Give the memory back to the pool; a second time does no harm.

        Raises
        ------
        BusyError
            A transfer that has not ended uses the memory; the buffer is unchanged.
        """
        if self._memory is None:
            return
        if self._owner.closed or self._owner.forked:
            self._memory = self._tensor = None
            return
        if live_ranges.overlap(self.address, self.nbytes):
            raise BusyError(
                "A transfer uses this buffer",
                nbytes=self.nbytes,
                remedy="Wait for the transfer before releasing the buffer",
            )
        # Of two threads that release at once, one detaches.
        mine = self._return is not None and self._return.detach() is not None
        self._memory = self._tensor = None
        if mine and self._offset is not None:
            self._owner.take_back(self._offset)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def __repr__(self) -> str:
        if self.released:
            return f"<Buffer of {self.nbytes} bytes, released>"
        return f"<Buffer {self.shape} {self.dtype} at {self.address:#x} on {self.device}>"
