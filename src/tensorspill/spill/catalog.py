"""Which names are stored where, who reads them, and which puts are under way.

The catalog gives a spill file the semantics of a dictionary. Every operation is *planned* under one
lock, in the order of the calls, and *settled* when its transfer has ended. Nothing is waited for
here: where a plan has to wait, the caller gets a `Ticket` or a `Growth`, and then tries again.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence

from tensorspill.errors import ClosedError
from tensorspill.spill.items import Item
from tensorspill.spill.plans import Busy, Extent, Plan, Planner, missing, unreadable
from tensorspill.spill.space import Growth, Space
from tensorspill.spill.tickets import Ticket

__all__ = ["Catalog"]


class Catalog:
    """Names, extents, and the transfers that use them; may be called from any thread.

    Attributes
    ----------
    path : str
        What errors name.
    pid : int
        The process that may use it.
    """

    def __init__(self, space: Space, path: str) -> None:
        self.pid = os.getpid()
        self.path = path
        self._space = space
        self._planner = Planner(space)
        self._stored = self._planner.stored
        self._pending: dict[str, Extent] = {}
        self._lock = threading.Lock()
        self._tickets: list[Ticket] = []
        #: Charges that come free when transfers under way have ended well.
        self._promised = 0
        self._live = 0
        self._closed = False
        self._counts = dict.fromkeys(
            ("puts", "gets", "deletes", "failures", "in_place", "growths", "waits"), 0
        )

    # -- planning --------------------------------------------------------------------------------

    def plan_put(
        self, items: Sequence[Item], refused: Collection[int] = ()
    ) -> Plan | Growth | Ticket:
        """Enter a put: take room for all items, or change nothing.

        Parameters
        ----------
        items : sequence of Item
        refused : collection of int
            Drives whose files could not grow for this put.

        Raises
        ------
        CapacityError
            There is no room, and none to come.
        ClosedError
        """
        with self._lock:
            self.check_open()
            if self._awaited(item.name for item in items):
                return self._ticket()
            self._space.refuse(refused)
            plan = self._planner.copies(items)
            if plan is None:
                if self._space.growth is not None:
                    return self._space.growth
                if self._promised_enough([item.nbytes for item in items]):
                    return self._ticket()
                try:
                    plan = self._planner.squeezed(items)
                except Busy:
                    return self._ticket()
            self._enter_put(plan)
            return plan

    def plan_get(self, items: Sequence[Item]) -> Plan | Ticket:
        """Enter a get: the room of what it reads is kept until it is settled.

        Raises
        ------
        MissingNameError, UnsupportedError, BrokenError
            A name is not stored, a tensor doesn't match, or what is stored is torn.
        ClosedError
        """
        with self._lock:
            self.check_open()
            if self._awaited(item.name for item in items):
                return self._ticket()
            plan, stored = Plan(items), self._stored
            for item in items:
                extent = stored.get(item.name)
                if extent is None:
                    raise missing(item.name, self.path)
                if (
                    extent.nbytes != item.nbytes
                    or extent.dtype is not item.tensor.dtype
                    or extent.torn
                ):
                    raise unreadable(item, extent, self.path)
                plan.extents.append(extent)
            for extent in plan.extents:
                extent.readers += 1
            self._live += 1
            self._counts["gets"] += 1
            return plan

    def delete(self, name: str) -> Ticket | None:
        """Forget a name; its room is free when those who read it have ended.

        Raises
        ------
        MissingNameError
        ClosedError
        """
        with self._lock:
            self.check_open()
            if name in self._pending:
                return self._ticket()
            extent = self._stored.pop(name, None)
            room = self._planner.reserved.pop(name, None)
            if extent is None and room is None:
                raise missing(name, self.path)
            if room is not None:
                self._space.give_back(*room)
            if extent is not None:
                self._drop(extent)
            self._counts["deletes"] += 1
            self._wake()
            return None

    def reserve(
        self, sizes: Mapping[str, int], refused: Collection[int] = ()
    ) -> Growth | Ticket | None:
        """Take room for names that are not stored yet; for all of them, or for none.

        Raises
        ------
        CapacityError, ClosedError
            As `plan_put`.
        """
        with self._lock:
            self.check_open()
            known = self._stored.keys() | self._pending.keys() | self._planner.reserved.keys()
            wanted = {name: nbytes for name, nbytes in sizes.items() if name not in known}
            self._space.refuse(refused)
            if self._planner.reserve(wanted):
                return None
            if self._space.growth is not None:
                return self._space.growth
            if self._promised_enough(list(wanted.values())):
                return self._ticket()
            raise self._planner.no_room(list(wanted.values()))

    # -- settling --------------------------------------------------------------------------------

    def settle_put(self, plan: Plan, error: BaseException | None, begun: bool = True) -> None:
        """Make what was put readable, or undo the plan.

        Parameters
        ----------
        plan : Plan
            From `plan_put`.
        error : BaseException or None
            What stopped the transfer.
        begun : bool
            Whether bytes may have been written.
        """
        with self._lock:
            replaced: list[Extent] = []
            for item, extent in zip(plan.items, plan.extents, strict=True):
                name = item.name
                del self._pending[name]
                victim = plan.victims.get(name) if plan.victims else None
                old = None if victim is not None else self._stored.get(name)
                if old is not None:
                    self._promised -= old.charge
                if error is None:
                    self._stored[name] = extent
                    if old is not None:
                        replaced.append(old)
                elif victim is not None:
                    victim.torn = victim.torn or begun
            # Backwards, so that room given back is taken again in the order of addresses.
            for old in reversed(replaced):
                self._drop(old)
            if error is not None:
                self._planner.undo(plan)
            self._settled(error)

    def settle_get(self, plan: Plan, error: BaseException | None) -> None:
        """Let go of what was read."""
        with self._lock:
            for extent in reversed(plan.extents):
                extent.readers -= 1
                if extent.dead and not extent.readers:
                    self._promised -= extent.charge
                    self._space.give_back(extent.pieces, extent.charge)
            self._settled(error)

    def grown(self, drive: int, capacity: int) -> None:
        """Note that a drive's file was made longer."""
        with self._lock:
            self._space.grown(drive, capacity)
            self._counts["growths"] += 1
            self._wake()

    def file_size(self, drive: int) -> int:
        """Return how many bytes of a drive's file are in use or free."""
        with self._lock:
            return self._space.drives[drive].allocator.capacity

    # -- questions -------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the catalog."""
        return os.getpid() != self.pid

    def check_open(self) -> None:
        """Raise `ClosedError` if the file was closed, or belongs to the parent process."""
        if self._closed:
            raise ClosedError("The spill file is closed", path=self.path)
        if self.forked:
            raise ClosedError(
                "The spill file belongs to the parent process",
                path=self.path,
                remedy="Open one in this process",
            )

    def names(self) -> list[str]:
        """Return the names, those whose put is under way included."""
        self.check_open()
        with self._lock:
            return list(self._stored | self._pending)

    def __contains__(self, name: object) -> bool:
        self.check_open()
        with self._lock:
            return name in self._stored or name in self._pending

    def find(self, name: str) -> Extent:
        """Return the extent of a name: the one that is being written, if there is one.

        Raises
        ------
        MissingNameError, ClosedError
        """
        self.check_open()
        with self._lock:
            extent = self._pending.get(name) or self._stored.get(name)
        if extent is None:
            raise missing(name, self.path)
        return extent

    def figures(self) -> dict[str, int]:
        """Return what statistics report."""
        with self._lock:
            current, space = self._stored | self._pending, self._space
            capacity = space.capacity
            if capacity is None:
                capacity = sum(drive.allocator.capacity for drive in space.drives)
            return self._counts | {
                "names": len(current),
                "stored_bytes": sum(extent.nbytes for extent in current.values()),
                "capacity": capacity,
                "free": space.free,
                "largest": space.largest(),
                "in_flight": self._live,
            }

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> Ticket | None:
        """Refuse operations from now on; return a ticket while some are under way."""
        with self._lock:
            self._closed = True
            self._wake()
            return self._ticket() if self._live else None

    # -- what holds the lock ---------------------------------------------------------------------

    def _awaited(self, names: Iterable[str]) -> bool:
        """Whether a put of one of the names is under way."""
        return bool(self._pending) and not self._pending.keys().isdisjoint(names)

    def _promised_enough(self, sizes: Sequence[int]) -> bool:
        """Whether there will be room when transfers under way have ended well."""
        return self._promised > 0 and self._planner.shortage(sizes) <= self._promised

    def _ticket(self) -> Ticket:
        ticket = Ticket()
        self._tickets.append(ticket)
        self._counts["waits"] += 1
        return ticket

    def _wake(self) -> None:
        tickets, self._tickets = self._tickets, []
        for ticket in tickets:
            ticket.call()

    def _enter_put(self, plan: Plan) -> None:
        stored, pending, victims = self._stored, self._pending, plan.victims
        for item, extent in zip(plan.items, plan.extents, strict=True):
            pending[item.name] = extent
            old = stored.get(item.name)
            if old is not None and item.name not in victims:
                self._promised += old.charge
        self._live += 1
        self._counts["puts"] += 1
        self._counts["in_place"] += len(victims)

    def _settled(self, error: BaseException | None) -> None:
        self._live -= 1
        self._counts["failures"] += error is not None
        if self._tickets:
            self._wake()

    def _drop(self, extent: Extent) -> None:
        """Give an extent's room back, now or when its readers have ended."""
        if extent.readers:
            extent.dead = True
            self._promised += extent.charge
        else:
            self._space.give_back(extent.pieces, extent.charge)
