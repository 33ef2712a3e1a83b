"""Which of the spilled parameters are kept in memory, which are fetched, which are let go."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import CancelledError

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.errors import CapacityError
from tensorspill.residency.entry import Spilled, State
from tensorspill.residency.pace import Coming, Pace
from tensorspill.residency.store import ParameterStore

__all__ = ["ResidentMemory"]

#: So many groups are fetched as soon as there is room, the others when it is time.
_IN_ANY_CASE = 2


class ResidentMemory:
    """Policy: holds what is in use, and beside it the soonest needed that fit.

    Who uses parameters calls `acquire` before, `unpin` and `tidy` after, and says each time what
    will be used next; what is not among the soonest of that is let go. Not safe for concurrent use.

    Parameters
    ----------
    store : ParameterStore
        Carries it out.
    capacity : int
        Bytes of the pool.
    prefetch : int, optional
        How many groups to keep or fetch ahead; as many as there is room for if not given.

    Attributes
    ----------
    pace : Pace
        Told by the caller what computes when.
    counts : dict of str to int
        What was done; see `ResidencyStatistics`.
    """

    def __init__(self, store: ParameterStore, capacity: int, prefetch: int | None = None) -> None:
        self.store = store
        self.capacity = capacity
        self._prefetch = prefetch
        self._rank: dict[Spilled, int] = {}
        self.pace: Pace[Hashable] = Pace(store.moved)
        self.counts = dict.fromkeys(("visits", "awaited", "on_demand", "ahead"), 0)

    def acquire(
        self,
        entries: Sequence[Spilled],
        upcoming: Iterable[Coming] = (),
        *,
        changing: bool = False,
    ) -> None:
        """Pin parameters in memory; on return they may be read, or changed if `changing`.

        Parameters
        ----------
        entries : sequence of Spilled
            What is needed.
        upcoming : iterable of Coming
            What will be needed next, soonest first; may be long.
        changing : bool
            Wait for writes of them as well.

        Raises
        ------
        CapacityError
            The pool has no room beside what is pinned.
        SpillError
            A read failed, or an earlier write of some parameter did; that one stays in memory.

        After an error nothing is pinned that was not before.
        """
        pinned = False
        try:
            # A Ctrl-C that was held back comes at the end of this block.
            with HeldInterrupts():
                self._pin(entries, 1)
                pinned = True
            self.store.collect()
            self._count(entries)
            ahead = {entry for entry in entries if entry.state is State.COMING}
            self._bring(entries)
            self._arrange(upcoming)
            while awaited := self._first_awaited(entries, changing):
                again = awaited in ahead
                ahead.difference_update(e for e in entries if e.transfer is awaited.transfer)
                self._await(awaited, again)
                # Once more, if a Ctrl-C has cancelled the transfer, or it failed ahead of its time.
                self._bring(entries)
            self.pace.given = time.perf_counter()
        except BaseException:
            if pinned:
                self._pin(entries, -1)
            raise

    def unpin(self, entries: Iterable[Spilled], *, changed: bool = False) -> None:
        """Take back what `acquire` did; call `tidy` soon.

        Neither waits nor raises. `changed` says that all but frozen parameters changed; changes in
        place that autograd counts are noticed in any case.
        """
        with HeldInterrupts():
            for entry in entries:
                entry.pins -= 1
                self.store.take_replaced(entry)
                parameter = entry.parameter
                if (changed and parameter.requires_grad) or parameter._version != entry.version:
                    entry.dirty, entry.stuck = True, False

    def tidy(self, upcoming: Iterable[Coming] = ()) -> None:
        """Begin to write what changed and is not pinned, and look ahead.

        Raises
        ------
        SpillError
            A write could not be started, or an earlier one failed; what could not be written stays
            in memory.
        """
        held = self.store.held
        self.store.write([e for e in held if e.dirty and not e.pins and not e.stuck])
        self.store.collect()
        self._arrange(upcoming)

    def look_ahead(self, upcoming: Iterable[Coming]) -> None:
        """Fetch what comes next, as far as there is room; neither waits nor raises."""
        self._arrange(upcoming)

    def flush(self) -> None:
        """Write what changed, wait for all transfers, and let go everything that is not pinned.

        Raises
        ------
        SpillError
            A write failed; a later call tries that one once more.
        """
        self._rank = {}
        self.store.write([e for e in self.store.held if e.dirty and not e.pins])
        self.store.collect(wait=True)
        self.store.evict([e for e in self.store.held if e.idle])

    def pinned_bytes(self, besides: Iterable[Spilled] = ()) -> int:
        """Return how many bytes of the pool must stay as they are, `besides` these."""
        others = self.store.held.keys() - set(besides)
        return sum(entry.nbytes for entry in others if entry.pins)

    # -- fetching what is needed -----------------------------------------------------------------

    def _pin(self, entries: Iterable[Spilled], count: int) -> None:
        with HeldInterrupts():
            for entry in entries:
                entry.pins += count

    def _first_awaited(self, entries: Sequence[Spilled], changing: bool) -> Spilled | None:
        states = (State.COMING, State.GOING) if changing else (State.COMING,)
        return next((entry for entry in entries if entry.state in states), None)

    def _count(self, entries: Sequence[Spilled]) -> None:
        self.counts["visits"] += 1
        if any(e.state is State.AWAY for e in entries):
            self.counts["on_demand"] += 1
        elif any(e.state is State.COMING for e in entries):
            self.counts["awaited"] += 1

    def _await(self, entry: Spilled, again: bool = False) -> None:
        """Wait for a transfer; that it failed is not raised if it is tried `again`."""
        error = self.store.outcome(entry)
        if error is not None and not again and not isinstance(error, CancelledError):
            raise error

    def _bring(self, entries: Sequence[Spilled]) -> None:
        """Begin to read what is away, making room for it if need be."""
        while away := [e for e in entries if e.state is State.AWAY]:
            try:
                self.store.read(away)
            except CapacityError:
                if not (self._give_way() or self._start_over(entries)):
                    raise

    def _give_way(self) -> bool:
        """Free something that nobody pins: what is needed last first; say whether there was any."""
        loose = [entry for entry in self.store.held if not entry.pins]
        if idle := [entry for entry in loose if entry.idle]:
            self.store.evict([max(idle, key=lambda e: self._rank.get(e, len(self._rank)))])
        elif going := [entry for entry in loose if entry.state is State.GOING]:
            self._await(going[0])
        elif coming := [entry for entry in loose if entry.state is State.COMING]:
            self.store.outcome(coming[-1])
        else:
            self.store.write(loose)
        return bool(loose)

    def _start_over(self, entries: Sequence[Spilled]) -> bool:
        """Let go even the part of `entries` that is here, where it splits the free space."""
        ours = [entry for entry in entries if entry.state is not State.AWAY and entry.pins == 1]
        for entry in ours:
            self._await(entry, entry.state is State.COMING)
        self.store.write([entry for entry in ours if entry.dirty])
        for entry in ours:
            self._await(entry)
        self.store.evict([e for e in ours if e.state is State.HERE and not e.dirty])
        return bool(ours)

    # -- looking ahead ---------------------------------------------------------------------------

    def _arrange(self, upcoming: Iterable[Coming]) -> None:
        """Let go what `_window` has not; fetch what it has, soonest first, while there is room."""
        window = self._window(upcoming)
        self._rank = {entry: rank for rank, group in enumerate(window) for entry in group.entries}
        self.store.evict([e for e in self.store.held if e.idle and e not in self._rank])
        for rank, coming in enumerate(window):
            away = [entry for entry in coming.entries if entry.state is State.AWAY]
            if away and not self._fetch_ahead(coming._replace(entries=away), rank):
                return

    def _fetch_ahead(self, coming: Coming, rank: int) -> bool:
        entries = coming.entries
        nbytes = sum(entry.nbytes for entry in entries)
        if nbytes > self.capacity - self.store.held_bytes:
            return False
        if rank >= _IN_ANY_CASE and self.pace.too_early(coming, nbytes + self.store.coming_bytes):
            return False
        try:
            self.store.read(entries)
        except CapacityError:  # what is free is in pieces, or others use the pool as well
            return False
        self.counts["ahead"] += 1
        return True

    def _window(self, upcoming: Iterable[Coming]) -> list[Coming]:
        """Return the soonest groups that fit beside what is pinned, without repetitions."""
        seen = {entry for entry in self.store.held if entry.pins}
        room = self.capacity - sum(entry.nbytes for entry in seen)
        window: list[Coming] = []
        for coming in upcoming:
            fresh = [entry for entry in coming.entries if entry not in seen]
            room -= sum(entry.nbytes for entry in fresh)
            if room < 0 or (fresh and len(window) == self._prefetch):
                break
            if fresh:
                window.append(coming._replace(entries=fresh))
                seen.update(fresh)
        return window
