"""Plans of puts and gets, and how a put finds room. Takes no lock: `Catalog` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tensorspill.errors import (
    BrokenError,
    CapacityError,
    MissingNameError,
    SpillError,
    UnsupportedError,
)
from tensorspill.spill.items import Item
from tensorspill.spill.space import Growth, Piece, Space

__all__ = ["Busy", "Extent", "Plan", "Planner", "missing", "unreadable"]


class Extent:
    """The room of one stored tensor, and what the tensor was.

    Attributes
    ----------
    charge : int
        What the room counts against the capacity.
    readers : int
        Gets under way; the room is not used again before they have ended.
    dead : bool
        No name leads here any more; the last reader gives the room back.
    torn : bool
        An overwrite in place failed.
    """

    __slots__ = (
        "charge",
        "dead",
        "digest",
        "dtype",
        "nbytes",
        "pieces",
        "readers",
        "shape",
        "torn",
    )

    def __init__(
        self, pieces: tuple[Piece, ...], charge: int, tensor: torch.Tensor, nbytes: int
    ) -> None:
        self.pieces = pieces
        self.charge = charge
        self.shape = tensor.shape
        self.dtype = tensor.dtype
        self.nbytes = nbytes
        self.digest: int | None = None
        self.readers = 0
        self.dead = False
        self.torn = False


class Plan:
    """A put or get that was entered in the catalog and must be settled, once.

    Attributes
    ----------
    items : sequence of Item
    extents : list of Extent
        In the order of the items.
    victims : dict of str to Extent
        For a put: the stored tensors that are overwritten in place.
    reserved : set of str
        For a put: the names that use room reserved for them.
    """

    __slots__ = ("extents", "items", "reserved", "victims")

    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.extents: list[Extent] = []
        self.victims: dict[str, Extent] = {}
        self.reserved: set[str] = set()


class Busy(Exception):  # noqa: N818 (never seen by users)
    """A tensor that should be overwritten in place is being read."""


class Planner:
    """Finds room for puts, all of it or none.

    Attributes
    ----------
    stored : dict of str to Extent
        What can be read.
    reserved : dict of str to (pieces, charge)
        Room kept for names that are not stored yet.
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.stored: dict[str, Extent] = {}
        self.reserved: dict[str, tuple[tuple[Piece, ...], int]] = {}

    def copies(self, items: Sequence[Item]) -> Plan | None:
        """Take room for all items beside what is stored.

        None if there is none, with `Space.growth` saying whether longer files would help.
        """
        plan = Plan(items)
        for item in items:
            extent = self._copy(plan, item)
            if extent is None:
                growth = self._enough([item.nbytes for item in items[len(plan.extents) :]])
                self.undo(plan)
                self.space.growth = growth
                return None
            plan.extents.append(extent)
        return plan

    def squeezed(self, items: Sequence[Item]) -> Plan:
        """Take room for new names, and for as many others as can be; overwrite the rest in place.

        Raises
        ------
        CapacityError
            There is no room; nothing changed.
        Busy
            It would do if there were no readers; nothing changed.
        """
        plan = Plan(items)
        found: dict[str, Extent] = {}
        laid = {item.name: self._in_place(item) for item in items}
        # First those that have no choice.
        for item in sorted(items, key=lambda item: laid[item.name] is not None):
            extent = self._copy(plan, item)
            if extent is None:
                extent = laid[item.name]
                victim = self.stored.get(item.name)
                if extent is None or victim is None or victim.readers:
                    plan.items = [item for item in items if item.name in found]
                    plan.extents = [found[item.name] for item in plan.items]
                    self.undo(plan)
                    raise Busy if extent else self.no_room([item.nbytes for item in items])
                plan.victims[item.name] = victim
            found[item.name] = extent
        plan.extents = [found[item.name] for item in items]
        return plan

    def reserve(self, sizes: Mapping[str, int]) -> bool:
        """Take room for names to come; False if there is none, with nothing changed."""
        taken: dict[str, tuple[tuple[Piece, ...], int]] = {}
        for name, nbytes in sizes.items():
            # The address is not known yet, so there has to be room for any residue.
            pieces = self.space.take(nbytes, -1)
            if pieces is None:
                growth = self._enough(list(sizes.values())[len(taken) :])
                for room in reversed(taken.values()):
                    self.space.give_back(*room)
                self.space.growth = growth
                return False
            taken[name] = pieces, self.space.charge(nbytes)
        self.reserved.update(taken)
        return True

    def undo(self, plan: Plan) -> None:
        """Give back what a plan took."""
        taken = plan.items[: len(plan.extents)]
        for item, extent in zip(reversed(taken), reversed(plan.extents), strict=True):
            if item.name not in plan.victims:
                self.give_back(plan, item.name, extent)

    def give_back(self, plan: Plan, name: str, extent: Extent) -> None:
        """Give back the room that one item of a plan took."""
        if name in plan.reserved:
            self.reserved[name] = extent.pieces, extent.charge
        else:
            self.space.give_back(extent.pieces, extent.charge)

    def shortage(self, sizes: Sequence[int]) -> int:
        """Return how many bytes are lacking for tensors of these sizes."""
        return sum(map(self.space.charge, sizes)) - self.space.free

    def no_room(self, sizes: Sequence[int]) -> CapacityError:
        """Return the error for tensors of these sizes."""
        return CapacityError(
            "The spill file has no room for this batch",
            asked=sum(map(self.space.charge, sizes)),
            free=self.space.free,
            largest=self.space.largest(),
            remedy="Delete tensors, or give the spill file more capacity",
        )

    def _copy(self, plan: Plan, item: Item) -> Extent | None:
        """Take room for one item: what was reserved for it, else any."""
        name, tensor, nbytes, address = item
        space = self.space
        if self.reserved and name in self.reserved:
            pieces, charge = self.reserved[name]
            laid = space.lay_out(pieces, nbytes, address)
            if laid is not None:
                del self.reserved[name]
                plan.reserved.add(name)
                return Extent(laid, charge, tensor, nbytes)
        taken = space.take(nbytes, address)
        if taken is None:
            return None
        return Extent(taken, -(-nbytes // space.block) * space.block, tensor, nbytes)

    def _in_place(self, item: Item) -> Extent | None:
        """Return what an item would be in the room of the tensor stored under its name."""
        old = self.stored.get(item.name)
        if old is None or not old.pieces:
            return None
        laid = self.space.lay_out(old.pieces, item.nbytes, item.address)
        return None if laid is None else Extent(laid, old.charge, item.tensor, item.nbytes)

    def _enough(self, sizes: Sequence[int]) -> Growth | None:
        """Let a growth be large enough for the rest of a batch as well."""
        growth, space = self.space.growth, self.space
        if growth is None:
            return None
        rest = sum(map(space.charge, sizes)) + len(sizes) * space.block
        wanted = growth.needed + space.charge(rest // len(space.drives))
        return growth._replace(wanted=max(growth.wanted, wanted))


def missing(name: str, path: str) -> MissingNameError:
    """Return the error for a name that is not stored."""
    return MissingNameError(f"No tensor {name!r} is stored", path=path)


def unreadable(item: Item, extent: Extent, path: str) -> SpillError:
    """Return the error for a destination that can't take what is stored."""
    if extent.torn:
        return BrokenError(
            f"Tensor {item.name!r} is torn: overwriting it in place failed",
            path=path,
            nbytes=extent.nbytes,
            remedy="Put it again, or delete it",
        )
    tensor = item.tensor
    return UnsupportedError(
        f"Tensor {item.name!r} is {tuple(extent.shape)} {extent.dtype}, the destination "
        f"{tuple(tensor.shape)} {tensor.dtype}",
        path=path,
        nbytes=extent.nbytes,
    )
