"""A reservation: free space of a pool that only its holder can turn into buffers."""

from __future__ import annotations

import weakref
from types import TracebackType
from typing import TYPE_CHECKING, Self

import torch

from tensorspill.errors import ClosedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.shapes import Shape, count_bytes, normal_shape

if TYPE_CHECKING:
    from tensorspill.pool.arena import Arena

__all__ = ["Reservation"]


class Reservation:
    """Space taken by `BufferPool.reserve`; what is not turned into buffers goes back at the end.

    Buffers made from it are like all others: released, their memory goes to the pool.
    """

    def __init__(self, arena: Arena, pieces: list[int]) -> None:
        self._arena = arena
        self._pieces = pieces
        self._return = weakref.finalize(self, arena.drop, pieces)
        self._return.atexit = False

    @property
    def nbytes(self) -> int:
        """Bytes still reserved, rounding included; 0 after `release`."""
        if self.released:
            return 0
        with self._arena.changed:
            return sum(map(self._arena.allocator.size_of, self._pieces))

    @property
    def released(self) -> bool:
        """Whether `release` was called, the pool closed, or this is a forked child."""
        return not self._return.alive or self._arena.closed or self._arena.forked

    def allocate(self, shape: Shape, dtype: torch.dtype = torch.uint8) -> Buffer:
        """Return a buffer cut from the smallest reserved piece that fits.

        Raises
        ------
        CapacityError
            No reserved piece is large enough; nothing changed.
        UnsupportedError
            The shape or the dtype is not possible.
        ClosedError
            The reservation was released, the pool closed, or this is a forked child.
        """
        sizes = normal_shape(shape)
        nbytes = count_bytes(sizes, dtype)
        arena = self._arena
        arena.check_open()
        if nbytes == 0:
            return arena.empty_buffer(sizes, dtype)
        with arena.changed:
            arena.check_open()
            if not self._return.alive:
                raise ClosedError("The reservation was released")
            offset = arena.carve_locked(self._pieces, nbytes)
            return arena.buffer_locked(offset, sizes, dtype, nbytes)

    def release(self) -> None:
        """Give back what was not turned into buffers; a second time does no harm."""
        arena = self._arena
        if arena.forked:
            return
        with arena.changed:
            if self._return.detach() is not None:
                arena.give_back_locked(self._pieces)

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
        state = "released" if self.released else f"{self.nbytes} bytes"
        return f"<Reservation: {state}>"
