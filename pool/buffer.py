"""A buffer: a range of a pool's memory, with a shape and a dtype."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from tensorspill.errors import BusyError, ClosedError
from tensorspill.pool.live import live_ranges

__all__ = ["Buffer", "Owner"]


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

    Attributes
    ----------
    nbytes : int
        Bytes of the tensor, rounding not included.
    address : int
        Where they are; 0 if there are none.
    device : torch.device
        Where the memory is.
    """

    __slots__ = (
        "__weakref__",
        "_offset",
        "_owner",
        "_return",
        "_tensor",
        "address",
        "device",
        "nbytes",
    )

    def __init__(
        self,
        tensor: torch.Tensor,
        owner: Owner,
        offset: int | None,
        returning: weakref.finalize[..., Any] | None,
    ) -> None:
        self._tensor: torch.Tensor | None = tensor
        self._owner = owner
        self._offset = offset
        self._return = returning
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes
        self.device = tensor.device

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a tensor of the shape and dtype asked for.

        Its storage is the buffer's own range and not the whole pool. Tensors made of it must not
        be used after `release`.

        Raises
        ------
        ClosedError
            The buffer was released, or its pool closed.
        """
        tensor = self._tensor
        if tensor is None:
            raise ClosedError("The buffer was released")
        if self._owner.closed:
            raise ClosedError("The buffer's pool is closed")
        return tensor

    @property
    def released(self) -> bool:
        """Whether the buffer was released, or its pool closed."""
        return self._tensor is None or self._owner.closed

    def release(self) -> None:
        """Give the memory back to the pool; a second time does no harm.

        Raises
        ------
        BusyError
            A transfer that has not ended uses the memory; the buffer is unchanged.
        """
        if self._tensor is None:
            return
        if self._owner.closed or self._owner.forked:
            self._tensor = None
            return
        if live_ranges.overlap(self.address, self.nbytes):
            raise BusyError(
                "A transfer uses this buffer",
                nbytes=self.nbytes,
                remedy="Wait for the transfer before releasing the buffer",
            )
        # Of two threads that release at once, one detaches.
        mine = self._return is not None and self._return.detach() is not None
        self._tensor = None
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
        tensor = self._tensor
        if tensor is None or self._owner.closed:
            return f"<Buffer of {self.nbytes} bytes, released>"
        return f"<Buffer {tuple(tensor.shape)} {tensor.dtype} at {self.address:#x}>"
