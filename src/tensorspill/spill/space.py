"""Room for tensors: which ranges of which drive's spill file are taken.

It knows offsets and never touches a byte. It takes no lock: `Catalog` serialises the calls.

Capacity is counted in *charges*, a tensor's bytes rounded up to whole blocks, so that whether a
tensor fits depends on its size alone. What exceeds the charges (a large tensor starts inside its
first block, see `RESIDUE_FROM`) has room of its own, and where no hole is large enough a tensor is
scattered over several.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tensorspill.errors import CapacityError
from tensorspill.pool.allocator import ExtentAllocator
from tensorspill.pool.sizes import round_up

__all__ = ["RESIDUE_FROM", "Drive", "Growth", "Piece", "Space"]

#: From this size on, data starts in the file at the residue of its memory address, so that all
#: whole blocks can move by O_DIRECT from where they lie. Costs at most one block more. Smaller
#: tensors are moved faster through staging than with a head and a tail of their own.
RESIDUE_FROM = 1 << 20

SMALLEST_STEP = 64 << 20
LARGEST_STEP = 1 << 30


class Piece(NamedTuple):
    """Some of a tensor's bytes in one file.

    Attributes
    ----------
    drive : int
        Which drive's file.
    base, room : int
        The extent: where it begins, and its bytes.
    offset, nbytes : int
        The data inside it.
    """

    drive: int
    base: int
    room: int
    offset: int
    nbytes: int


class Growth(NamedTuple):
    """A wish for a longer file: to `wanted` bytes, or at least to `needed`."""

    drive: int
    wanted: int
    needed: int


@dataclass(slots=True, eq=False)
class Drive:
    """One drive's file.

    Attributes
    ----------
    allocator : ExtentAllocator
        Of the file's bytes so far.
    memory : int
        Alignment that a memory address needs to go direct.
    fixed : bool
        The file can't grow, or not now.
    spares : dict of int to list of int
        Extents given back, by their size: most puts ask for a size that was there before.
    spare_bytes : int
        Bytes in `spares`; the allocator counts them as allocated.
    """

    allocator: ExtentAllocator
    memory: int
    fixed: bool
    spares: dict[int, list[int]] = field(default_factory=dict)
    spare_bytes: int = 0

    def take(self, size: int) -> int | None:
        """Return the offset of an extent of exactly `size`, or None."""
        spare = self.spares.get(size)
        if spare:
            self.spare_bytes -= size
            return spare.pop()
        try:
            return self.allocator.allocate(size)
        except CapacityError:
            if not self.spare_bytes:
                return None
        self.merge()
        try:
            return self.allocator.allocate(size)
        except CapacityError:
            return None

    def give_back(self, base: int, size: int) -> None:
        """Keep an extent for the next one of its size."""
        self.spares.setdefault(size, []).append(base)
        self.spare_bytes += size

    def merge(self) -> None:
        """Give the spare extents to the allocator, which joins what touches."""
        for offsets in self.spares.values():
            for offset in offsets:
                self.allocator.free(offset)
        self.spares.clear()
        self.spare_bytes = 0

    @property
    def free(self) -> int:
        """Bytes in no tensor."""
        return self.allocator.free_bytes + self.spare_bytes


class Space:
    """The drives' files as one space.

    Parameters
    ----------
    drives : sequence of (int, int)
        Alignment of extents and of memory addresses, for each drive.
    capacity : int or None
        Charges that may be taken in all; None for as much as the drives have.
    stripe : int
        Smallest number of bytes for which a tensor is divided over drives.
    residue_from : int
        See `RESIDUE_FROM`.

    Attributes
    ----------
    used : int
        Charges taken.
    growth : Growth or None
        What would have made the last `take` that returned None succeed.
    """

    def __init__(
        self,
        drives: Sequence[tuple[int, int]],
        capacity: int | None,
        stripe: int,
        residue_from: int = RESIDUE_FROM,
    ) -> None:
        self.block = max(alignment for alignment, _ in drives)
        self.capacity = None if capacity is None else round_up(capacity, self.block)
        self.stripe = round_up(stripe, self.block)
        self.used = 0
        self.growth: Growth | None = None
        self._residue_from = residue_from
        self._turn = 0
        self.drives = [
            Drive(ExtentAllocator(0, alignment), memory, capacity is not None)
            for alignment, memory in drives
        ]

    def first_size(self, file_size: int) -> int:
        """Return how long each drive's file must be at first; `file_size` if that doesn't matter.

        A given capacity is there from the start, with room for the residues of large tensors.
        """
        if self.capacity is None:
            return file_size
        share = round_up(-(-self.capacity // len(self.drives)), self.block)
        return share + -(-share // self._residue_from) * self.block

    def charge(self, nbytes: int) -> int:
        """Return what a tensor counts against the capacity."""
        return -(-nbytes // self.block) * self.block

    @property
    def free(self) -> int:
        """Charges that can still be taken; without a capacity, before the files grow."""
        if self.capacity is None:
            return sum(drive.free for drive in self.drives)
        return self.capacity - self.used

    def largest(self) -> int:
        """Return the bytes of the largest extent that could be had now."""
        for drive in self.drives:
            drive.merge()
        return min(self.free, max(drive.allocator.largest for drive in self.drives))

    def take(self, nbytes: int, address: int) -> tuple[Piece, ...] | None:
        """Take room for a tensor.

        Parameters
        ----------
        nbytes, address : int
            Of the tensor's memory.

        Returns
        -------
        tuple of Piece or None
            In the order of the tensor's bytes; none for no bytes. None if there is no room, with
            nothing changed but `growth`.
        """
        self.growth = None
        charge = -(-nbytes // self.block) * self.block
        if self.capacity is not None and self.used + charge > self.capacity:
            return None
        count = min(len(self.drives), nbytes // self.stripe) or 1
        pieces: tuple[Piece, ...] | None
        if nbytes == 0:
            pieces = ()
        elif count == 1:
            piece = self._whole(self._turn, nbytes, address)
            pieces = self._elsewhere(nbytes, address) if piece is None else (piece,)
        else:
            pieces = self._striped(nbytes, address, count)
        if pieces is not None:
            self.used += charge
            if len(self.drives) > 1:
                self._turn = (self._turn + count) % len(self.drives)
        return pieces

    def give_back(self, pieces: Sequence[Piece], charge: int) -> None:
        """Make the room of a tensor free."""
        self.used -= charge
        for piece in reversed(pieces):
            self.drives[piece.drive].give_back(piece.base, piece.room)

    def lay_out(
        self, pieces: Sequence[Piece], nbytes: int, address: int
    ) -> tuple[Piece, ...] | None:
        """Return how a tensor lies in room that was taken for another; None if it does not fit."""
        for align in (True, False):
            laid, done = [], 0
            for piece in pieces:
                left = nbytes - done
                residue = 0
                if align and min(left, piece.room) >= self._residue_from:
                    residue = (address + done) % self.drives[piece.drive].memory
                part = min(left, piece.room - residue)
                laid.append(piece._replace(offset=piece.base + residue, nbytes=part))
                done += part
            if done == nbytes:
                return tuple(laid)
        return None

    def refuse(self, drives: Collection[int]) -> None:
        """Say which files can't grow now."""
        for index, drive in enumerate(self.drives):
            drive.fixed = self.capacity is not None or index in drives

    def grown(self, drive: int, capacity: int) -> None:
        """Note that a drive's file now has `capacity` bytes."""
        allocator = self.drives[drive].allocator
        if capacity > allocator.capacity:
            allocator.grow(capacity)

    def _whole(self, index: int, nbytes: int, address: int) -> Piece | None:
        """Take one extent on one drive."""
        drive = self.drives[index]
        residue = address % drive.memory if nbytes >= self._residue_from else 0
        unit = drive.allocator.alignment
        size = -(-(nbytes + residue) // unit) * unit
        base = drive.take(size)
        if base is not None:
            return Piece(index, base, size, base + residue, nbytes)
        if self.growth is None and not drive.fixed:
            self.growth = self._growth(index, size)
        return None

    def _growth(self, index: int, size: int) -> Growth:
        drive = self.drives[index]
        now = drive.allocator.capacity
        step = min(max(now // 4, SMALLEST_STEP), LARGEST_STEP)
        return Growth(index, now + round_up(max(step, size), self.block), now + size)

    def _striped(self, nbytes: int, address: int, count: int) -> tuple[Piece, ...] | None:
        """Divide a tensor over `count` drives, in parts that are whole blocks but the last."""
        share = round_up(-(-nbytes // count), self.block)
        taken: list[Piece] = []
        for turn, start in enumerate(range(0, nbytes, share)):
            index = (self._turn + turn) % len(self.drives)
            part = min(share, nbytes - start)
            piece = self._whole(index, part, address + start)
            found = self._elsewhere(part, address + start) if piece is None else (piece,)
            if found is None:
                self._undo(taken)
                return None
            taken.extend(found)
        return tuple(taken)

    def _elsewhere(self, nbytes: int, address: int) -> tuple[Piece, ...] | None:
        """Take room on any drive, in several extents if need be, unless a file can grow."""
        if self.growth is not None:
            return None
        for index in range(len(self.drives)):
            piece = self._whole(index, nbytes, address)
            if piece is not None:
                self.growth = None
                return (piece,)
        return None if self.growth is not None else self._scattered(nbytes)

    def _scattered(self, nbytes: int) -> tuple[Piece, ...] | None:
        """Fill holes, the largest of each drive first."""
        taken: list[Piece] = []
        left = nbytes
        for index, drive in enumerate(self.drives):
            drive.merge()
            while left and (hole := drive.allocator.largest):
                part = min(left, hole)
                base = drive.allocator.allocate(part)
                taken.append(Piece(index, base, drive.allocator.size_of(base), base, part))
                left -= part
        if left:
            self._undo(taken)
            return None
        return tuple(taken)

    def _undo(self, taken: Sequence[Piece]) -> None:
        for piece in taken:
            self.drives[piece.drive].give_back(piece.base, piece.room)
