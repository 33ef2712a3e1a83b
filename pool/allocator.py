"""An aligned variable-size allocator of offsets: for memory and for file extents alike."""

from __future__ import annotations

from tensorspill.errors import CapacityError, UnsupportedError
from tensorspill.pool.holes import Holes
from tensorspill.pool.sizes import format_bytes, round_down, round_up

__all__ = ["ExtentAllocator"]


class ExtentAllocator:
    """Hands out extents of ``[0, capacity)`` and takes them back, coalescing what is free.

    It knows offsets only and touches no memory and no file. It takes no lock: whoever owns it
    serialises the calls.

    Parameters
    ----------
    capacity : int
        Bytes to hand out; what exceeds a multiple of `alignment` stays unused.
    alignment : int
        Power of two. Offsets and sizes of extents are multiples of it.

    Raises
    ------
    UnsupportedError
        The capacity is negative or the alignment is no power of two.
    """

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        if alignment < 1 or alignment & (alignment - 1):
            raise UnsupportedError(f"An alignment must be a power of two, not {alignment}")
        self._alignment = alignment
        self._capacity = 0
        self._allocated = 0
        self._extents: dict[int, int] = {}
        self._holes = Holes()
        self.grow(capacity)

    @property
    def alignment(self) -> int:
        """What offsets and sizes are multiples of."""
        return self._alignment

    @property
    def capacity(self) -> int:
        """Bytes that can be handed out in all, a multiple of the alignment."""
        return self._capacity

    @property
    def allocated(self) -> int:
        """Bytes in extents, rounding included."""
        return self._allocated

    @property
    def free_bytes(self) -> int:
        """Bytes in no extent."""
        return self._capacity - self._allocated

    @property
    def largest(self) -> int:
        """Bytes of the largest extent that could be allocated now."""
        return self._holes.largest

    def __len__(self) -> int:
        return len(self._extents)

    def __contains__(self, offset: object) -> bool:
        return offset in self._extents

    def allocate(self, nbytes: int) -> int:
        """Return the offset of a new extent of `nbytes`, rounded up to the alignment.

        It lies in the lowest-addressed hole that is large enough, so that a spill file keeps
        using ranges that were written before. Zero bytes take one unit of alignment, so that every
        extent has an offset of its own.

        Raises
        ------
        CapacityError
            No hole is large enough; nothing changed.
        UnsupportedError
            `nbytes` is negative.
        """
        if nbytes < 0:
            raise UnsupportedError(f"Can't allocate {nbytes} bytes")
        size = round_up(max(nbytes, 1), self._alignment)
        chosen = self._choose(self._holes, size)
        if chosen is None:
            raise CapacityError(
                f"No free piece of {format_bytes(size)}",
                asked=nbytes,
                free=self.free_bytes,
                largest=self.largest,
            )
        index, offset = chosen
        self._holes.take(index, offset, size)
        self._extents[offset] = size
        self._allocated += size
        return offset

    def free(self, offset: int) -> None:
        """Take back the extent at `offset`.

        Raises
        ------
        UnsupportedError
            No extent begins there; nothing changed.
        """
        size = self.size_of(offset)
        del self._extents[offset]
        self._holes.add(offset, size)
        self._allocated -= size

    def size_of(self, offset: int) -> int:
        """Return the bytes of the extent at `offset`, rounding included.

        Raises
        ------
        UnsupportedError
            No extent begins there.
        """
        try:
            return self._extents[offset]
        except KeyError:
            raise UnsupportedError("No extent begins at this offset", offset=offset) from None

    def split(self, offset: int, nbytes: int) -> int | None:
        """Cut an extent in two; each part is freed for itself.

        Parameters
        ----------
        offset : int
            Where the extent begins.
        nbytes : int
            Bytes that the first part keeps, rounded up to the alignment.

        Returns
        -------
        int or None
            Offset of the second part; None if nothing was left for one.

        Raises
        ------
        UnsupportedError
            No extent begins there, or it is smaller than `nbytes`; nothing changed.
        """
        size = self.size_of(offset)
        first = round_up(max(nbytes, 1), self._alignment)
        if nbytes < 0 or first > size:
            raise UnsupportedError(
                f"An extent of {size} bytes has no part like this", offset=offset, nbytes=nbytes
            )
        if first == size:
            return None
        self._extents[offset] = first
        self._extents[offset + first] = size - first
        return offset + first

    def grow(self, capacity: int) -> None:
        """Raise the capacity; what is added is free.

        Raises
        ------
        UnsupportedError
            `capacity` is below the present one; nothing changed.
        """
        usable = round_down(capacity, self._alignment)
        if usable < self._capacity:
            raise UnsupportedError(f"Can't shrink from {self._capacity} to {capacity} bytes")
        if usable > self._capacity:
            self._holes.add(self._capacity, usable - self._capacity)
            self._capacity = usable

    def _choose(self, holes: Holes, size: int) -> tuple[int, int] | None:
        """Return where an extent goes: the index of a hole, and an aligned offset inside it.

        The policy, for subclasses to replace; None if no hole has `size` bytes.
        """
        index = holes.first_fit(size)
        return None if index is None else (index, int(holes.starts[index]))

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {format_bytes(self._capacity)}, "
            f"{format_bytes(self._allocated)} in {len(self)} extents>"
        )
