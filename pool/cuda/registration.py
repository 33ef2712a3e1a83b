"""Our own table of the GPU memory that is registered with cuFile, through kvikio.

cuFile keeps one table for the process and knows no owner: registering an allocation twice is an
error, and freeing it before it is deregistered can hang the kernel module. So there is one table
here as well, with a budget, and our own allocations are freed through it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from tensorspill.errors import ClosedError
from tensorspill.pool.cuda import memory
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.pointers import describe
from tensorspill.pool.shapes import bytes_at
from tensorspill.pool.sizes import format_bytes

__all__ = ["Hold", "RegistrationStatistics", "Registrations"]


@dataclass(frozen=True, slots=True)
class RegistrationStatistics:
    """What is registered, over the whole process.

    Attributes
    ----------
    budget : int
        Bytes that may be registered at a time.
    nbytes, allocations : int
        Registered now.
    held : int
        Allocations of these that transfers use.
    registered, evicted : int
        Registrations made so far, and those undone to make room for others.
    refused : mapping of str to int
        Why allocations were not registered, and how often.
    """

    budget: int
    nbytes: int
    allocations: int
    held: int
    registered: int
    evicted: int
    refused: Mapping[str, int]


@dataclass(slots=True)
class _Entry:
    base: int
    nbytes: int
    device: int
    holders: int = 0


class _Table:
    """All registrations of the process, the least recently used first.

    The lock is never waited for while the garbage collector frees memory: what it brings waits in
    `freed` for whoever has the lock.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.entries: OrderedDict[int, _Entry] = OrderedDict()
        self.budgets: dict[int, int] = {}
        self.counts = Counter[str]()
        self.refused = Counter[str]()
        self.freed: deque[Callable[[], None]] = deque()

    @property
    def budget(self) -> int:
        return max(self.budgets.values(), default=0)

    @property
    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self.entries.values())

    def take(self, address: int, device: int) -> _Entry | str:
        """Register the allocation of an address, if it is not; the lock is held."""
        with current(device):
            info = describe(address)
            if info.kind != "device":
                return "not GPU memory"
            entry = self.entries.get(info.base)
            if entry is None:
                if (why := self._register(info.base, info.nbytes)) is not None:
                    return why
                entry = self.entries[info.base] = _Entry(info.base, info.nbytes, device)
                self.counts["registered"] += 1
        self.entries.move_to_end(entry.base)
        entry.holders += 1
        return entry

    def _register(self, base: int, nbytes: int) -> str | None:
        from kvikio.buffer import memory_register

        if nbytes > self.budget:
            return f"larger than the budget of {format_bytes(self.budget)}"
        while self.nbytes + nbytes > self.budget:
            if not self._evict():
                return f"the budget of {format_bytes(self.budget)} is in use"
        while True:
            try:
                memory_register(bytes_at(base, nbytes))
            except Exception as error:
                # Perhaps there is no room in the GPU's window for others: idle ones make some.
                if not self._evict():
                    return str(error).splitlines()[0]
            else:
                return None

    def _evict(self) -> bool:
        idle = next((entry for entry in self.entries.values() if not entry.holders), None)
        if idle is not None:
            self.undo(idle)
            self.counts["evicted"] += 1
        return idle is not None

    def undo(self, entry: _Entry) -> None:
        """Deregister an allocation, which is still there; the lock is held."""
        from kvikio.buffer import memory_deregister

        del self.entries[entry.base]
        try:
            with current(entry.device):
                memory_deregister(bytes_at(entry.base, entry.nbytes))
        except Exception as error:
            self.refused[f"deregistering: {str(error).splitlines()[0]}"] += 1

    def free(self, address: int, give_back: Callable[[], None]) -> None:
        """Free an allocation of ours, deregistered first; see `drain`."""

        def settle() -> None:
            entry = self.entries.get(address)
            if entry is not None:
                self.undo(entry)
            give_back()

        self.freed.append(settle)
        self.drain()

    def drain(self) -> None:
        """Do what waits in `freed`, unless somebody has the lock, who does it then."""
        while self.freed and self.lock.acquire(blocking=False):
            try:
                while self.freed:
                    self.freed.popleft()()
            finally:
                self.lock.release()

    def let_go(self, entry: _Entry) -> None:
        """Count down; the lock is held."""
        entry.holders -= 1
        if not entry.holders and not memory.is_owned(entry.base):
            self._undo_once(entry)

    def leave(self, user: int) -> None:
        """Forget a budget; the last one takes all registrations along. The lock is held."""
        self.budgets.pop(user, None)
        if not self.budgets:
            for entry in list(self.entries.values()):
                self._undo_once(entry)

    def _undo_once(self, entry: _Entry) -> None:
        if self.entries.get(entry.base) is entry:
            self.undo(entry)


_table = _Table()


class Hold:
    """Keeps an allocation registered, until `release`.

    Attributes
    ----------
    base, nbytes : int
        The allocation.
    """

    def __init__(self, table: _Table, entry: _Entry, owner: Any) -> None:
        self.base, self.nbytes = entry.base, entry.nbytes
        self._table, self._entry, self._owner = table, entry, owner
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _let_go_later, table, entry, owner, self._pid)
        self._end.atexit = False

    def release(self) -> None:
        """Let go of the registration, before the memory's owner may free it.

        Memory of our own slabs stays registered for the next time, until others need its room;
        that of others is deregistered, since nobody tells us when they free it.
        """
        if self._end.detach() is None or os.getpid() != self._pid:
            return
        with self._table.lock:
            self._table.let_go(self._entry)
        self._table.drain()
        self._owner = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()


class Registrations:
    """A user's view of the process's registrations with cuFile.

    May be used from any thread. Of several users at a time, the largest budget holds; when the last
    one closes, everything is deregistered.

    Parameters
    ----------
    budget : int
        Bytes of GPU memory that may be registered at a time: what the GPU's window (BAR1) and
        cuFile's ``max_device_pinned_mem_size_kb`` leave.
    """

    def __init__(self, budget: int) -> None:
        self._table = _table
        memory.set_freeing(_table.free)
        with _table.lock:
            _table.budgets[id(self)] = budget
        self._pid = os.getpid()
        self._end = weakref.finalize(self, _leave_later, _table, id(self), self._pid)
        # Not at exit: cuFile may have been torn down by then.
        self._end.atexit = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return not self._end.alive

    def hold(self, address: int, device: int, owner: Any = None) -> Hold | None:
        """Register the whole allocation that an address lies in, unless it is registered.

        Parameters
        ----------
        address : int
            Of GPU memory.
        device : int
            Number of its GPU.
        owner : object
            Kept until `Hold.release`.

        Returns
        -------
        Hold or None
            None if it is over the budget or cuFile refused, which `statistics` tells; transfers
            work all the same, through cuFile's own buffers.

        Raises
        ------
        ClosedError
            `close` was called, or this is a forked child.
        """
        if self.closed:
            raise ClosedError("The table of registrations is closed")
        table = self._table
        try:
            with table.lock:
                entry = table.take(address, device)
                if isinstance(entry, str):
                    table.refused[entry] += 1
                    return None
                return Hold(table, entry, owner)
        finally:
            table.drain()

    def statistics(self) -> RegistrationStatistics:
        """Return what is registered now, and what was done so far."""
        table = self._table
        table.drain()
        with table.lock:
            entries = list(table.entries.values())
            return RegistrationStatistics(
                budget=table.budget,
                nbytes=table.nbytes,
                allocations=len(entries),
                held=sum(entry.holders > 0 for entry in entries),
                registered=table.counts["registered"],
                evicted=table.counts["evicted"],
                refused=dict(table.refused),
            )

    def close(self) -> None:
        """Deregister all, if nobody else registers; a second time does no harm.

        Holds have to be released before.
        """
        if self._end.detach() is None or os.getpid() != self._pid:
            return
        with self._table.lock:
            self._table.leave(id(self))
        self._table.drain()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _let_go_later(table: _Table, entry: _Entry, owner: Any, pid: int) -> None:
    """Let go of what was dropped; this may be the garbage collector, which must not wait."""

    def settle() -> None:
        table.let_go(entry)
        _ = owner  # until now

    if os.getpid() == pid:
        table.freed.append(settle)
        table.drain()


def _leave_later(table: _Table, user: int, pid: int) -> None:
    if os.getpid() == pid:
        table.freed.append(lambda: table.leave(user))
        table.drain()
