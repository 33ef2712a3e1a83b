"""What a swapper holds, what it can be asked, and how it ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.errors import BusyError, ClosedError, UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.reservation import Reservation
from tensorspill.pool.sizes import parse_bytes, round_up
from tensorspill.spill.file import Folder, SpillFile
from tensorspill.spill.records import Location
from tensorspill.swap.buffers import UNIT, SwapBuffers
from tensorspill.swap.entries import (
    Entries,
    Entry,
    Parameter,
    Swappable,
    check_status,
    check_stored,
    numel_of,
)
from tensorspill.swap.status import SwapperStatistics, SwapStatus

__all__ = ["SwapperCore", "listed"]


class SwapperCore:
    """The part of `ParameterSwapper` that moves nothing; see there."""

    def __init__(
        self,
        folder: Folder | Sequence[Folder],
        dtype: torch.dtype | None = torch.bfloat16,
        budget: int | str = "1GiB",
        *,
        min_bytes: int | str = "1MiB",
        verify: bool = False,
        device: str | torch.device = "cpu",
        backend: str = "auto",
        pool: BufferPool | None = None,
        capacity: int | str | None = None,
        **options: Any,
    ) -> None:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise UnsupportedError(f"{dtype!r} is no torch.dtype")
        self.dtype = dtype
        self.min_bytes = parse_bytes(min_bytes)
        self._own_pool = pool is None
        self.pool = BufferPool(budget, device) if pool is None else pool
        self.budget = self.pool.capacity
        try:
            self.file = SpillFile(folder, capacity, device, backend, verify, **options)
        except BaseException:
            if self._own_pool:
                self.pool.close()
            raise
        self._buffers = SwapBuffers(self.pool, keep=self._own_pool)
        self._entries = Entries(dtype)
        self._reserved: list[Reservation] = []
        self._pid = os.getpid()

    # -- questions -------------------------------------------------------------------------------

    def status(self, parameter: Parameter) -> SwapStatus:
        """Return where a parameter's value is; AVAILABLE if the swapper doesn't know it."""
        entry = self._entries.find(parameter)
        return SwapStatus.AVAILABLE if entry is None else entry.status

    def swappable(self, parameter: Parameter | int) -> bool:
        """Whether a parameter, or a number of elements, has at least `min_bytes`.

        Advice, and no condition of anything else.
        """
        if isinstance(parameter, int):
            return parameter * (self.dtype or torch.float32).itemsize >= self.min_bytes
        dtype = self.dtype
        if dtype is None:
            dtype = (
                parameter.dtype if isinstance(parameter, torch.Tensor) else parameter.tensor.dtype
            )
        return numel_of(parameter) * dtype.itemsize >= self.min_bytes

    def location(self, parameter: Parameter, must_exist: bool = True) -> tuple[Location, ...]:
        """Return where a parameter's value is in the spill file: paths, offsets and bytes.

        Without `must_exist` a parameter that was never written has none.

        Raises
        ------
        MissingNameError
            It was never written.
        ClosedError
        """
        self._check_open()
        entry = self._entries.find(parameter)
        if entry is None or not entry.stored:
            if must_exist:
                check_stored([self._look_up([parameter])[0]])
            return ()
        return self.file.location(entry.name)

    def ready(self, parameters: Iterable[Parameter]) -> bool:
        """Whether all parameters are AVAILABLE."""
        return all(self.status(parameter) is SwapStatus.AVAILABLE for parameter in parameters)

    def has_room(self, parameters: Iterable[Parameter]) -> bool:
        """Whether there are enough free bytes to swap all of these in now.

        For prefetchers. Free bytes may lie in pieces that are too small, and others may be faster;
        `swap_in` then raises `CapacityError`.
        """
        needed = 0
        for parameter in parameters:
            entry = self._entries.find(parameter)
            if entry is not None and entry.status is SwapStatus.NOT_AVAILABLE and not entry.taken:
                needed += round_up(entry.nbytes, UNIT)
        return needed <= self.available_bytes

    @property
    def available_bytes(self) -> int:
        """Bytes of memory that are free for parameters."""
        return self.pool.statistics().free + self._buffers.idle_bytes

    def available_buffers(self, numel: int) -> int:
        """Return how many buffers of `numel` elements the free bytes would do for."""
        dtype = self.dtype or torch.float32
        return self.available_bytes // max(round_up(numel * dtype.itemsize, UNIT), 1)

    def statistics(self) -> SwapperStatistics:
        """Return the state and what was done so far; works after `close` as well."""
        with self._entries.lock:
            states = [entry.status for entry in self._entries]
            counts = dict(self._entries.counts)
        return SwapperStatistics(
            available=states.count(SwapStatus.AVAILABLE),
            not_available=states.count(SwapStatus.NOT_AVAILABLE),
            inflight=states.count(SwapStatus.INFLIGHT),
            idle_bytes=self._buffers.idle_bytes,
            pool=self.pool.statistics(),
            file=self.file.statistics(),
            **counts,
        )

    # -- memory ----------------------------------------------------------------------------------

    def get_buffer(self, parameter: Parameter, numel: int | None = None) -> torch.Tensor:
        """Take memory for a parameter and return it, in the parameter's shape, to be filled.

        The next `swap_out` of the parameter writes this memory in place of the parameter's data;
        the next `swap_in` reads into it; `release` gives it back unused.

        Parameters
        ----------
        parameter : Parameter
            Any status but INFLIGHT. Its data is left alone.
        numel : int, optional
            Number of elements, where it is not the parameter's own; only for objects that were
            never written.

        Raises
        ------
        CapacityError
            There is no room.
        BusyError, UnsupportedError, ClosedError
            The parameter is INFLIGHT, has such a buffer already, or can't have that many elements.
        """
        self._check_open()
        with HeldInterrupts(), torch.inference_mode(False), self._entries.lock:
            (entry,) = self._entries.look_up([parameter])
            check_status([entry], SwapStatus.AVAILABLE, SwapStatus.NOT_AVAILABLE)
            if entry.taken is not None:
                raise UnsupportedError("The parameter has a buffer already")
            if numel is not None and numel != entry.numel:
                entry.resize(numel)
            (entry.taken,) = self._buffers.take([entry])
            self._entries.keep([entry])
            return entry.view(entry.taken)

    def rebudget(self, budget: int | str) -> None:
        """Take another budget of memory, while none of it is in use.

        Raises
        ------
        BusyError
            A parameter is in the swapper's memory.
        UnsupportedError
            The pool is not the swapper's own.
        BrokenError
            There is no such memory. Nothing changed.
        ClosedError
        """
        self._check_open()
        if not self._own_pool:
            raise UnsupportedError("The budget is that of a pool which isn't the swapper's own")
        self._buffers.release_idle()
        if self.pool.statistics().allocated:
            raise BusyError("The swapper's memory is in use")
        pool, old = BufferPool(budget, self.pool.device), self.pool
        self.pool, self._buffers = pool, SwapBuffers(pool, keep=True)
        self.budget = pool.capacity
        old.close()

    def release(self, parameters: Iterable[Parameter]) -> None:
        """Give back the memory of parameters without writing them: they are NOT_AVAILABLE.

        What was changed since they were last written is lost. Buffers from `get_buffer` are given
        back as well; a parameter that is NOT_AVAILABLE needs to have one.

        Raises
        ------
        MissingNameError
            A parameter was never written: its value would be lost. Nothing changed.
        BusyError, UnsupportedError
            One is INFLIGHT, or has nothing to give back. Nothing changed.
        ClosedError
        """
        self._check_open()
        known = listed(parameters)
        free: list[Buffer] = []
        with HeldInterrupts(), torch.inference_mode(False):
            with self._entries.lock:
                batch = self._entries.look_up(known)
                unfilled = [entry for entry in batch if entry.taken is not None]
                others = [entry for entry in batch if entry.taken is None]
                check_status(unfilled, SwapStatus.AVAILABLE, SwapStatus.NOT_AVAILABLE)
                check_status(others, SwapStatus.AVAILABLE)
                check_stored(others)
                for entry in batch:
                    free += [memory for memory in (entry.home, entry.taken) if memory is not None]
                    entry.home = entry.taken = None
                    if entry.stored:
                        entry.data = entry.placeholder()
                        entry.status = SwapStatus.NOT_AVAILABLE
            self._buffers.give_back(reversed(free))

    def reserve_free(self) -> Reservation:
        """Lend all free memory: the caller makes buffers of it, until `release_reserved`.

        Raises
        ------
        CapacityError, ClosedError
        """
        self._check_open()
        self._buffers.release_idle()
        reservation = self.pool.reserve(self.pool.statistics().free)
        self._reserved.append(reservation)
        return reservation

    def release_reserved(self) -> None:
        """Take back what was lent by `reserve_free` and is not in buffers, which are their own."""
        while self._reserved:
            self._reserved.pop().release()

    def reserve_space(self, parameters: Iterable[Parameter]) -> None:
        """Take room in the spill file for parameters that were never written yet.

        Raises
        ------
        CapacityError, NoSpaceError
            There is no room for all; nothing changed.
        ClosedError
        """
        batch = self._look_up(parameters, keep=True)
        self.file.reserve({entry.name: entry.nbytes for entry in batch if not entry.stored})

    def forget(self, parameters: Iterable[Parameter], *, lose: bool = False) -> None:
        """Delete the stored values of parameters, and know them no more.

        Parameters
        ----------
        parameters : iterable of Parameter
            Each AVAILABLE, or never heard of. Their data stays what it is, in memory of its own.
        lose : bool
            Also of those that are NOT_AVAILABLE: their data stays a placeholder.

        Raises
        ------
        BusyError, UnsupportedError
            One is INFLIGHT or NOT_AVAILABLE. Nothing changed.
        ClosedError
        """
        free: list[Buffer] = []
        batch = self._look_up(parameters)
        with HeldInterrupts(), torch.inference_mode(False):
            with self._entries.lock:
                away = (SwapStatus.NOT_AVAILABLE,) if lose else ()
                check_status(batch, SwapStatus.AVAILABLE, *away)
                free += _detach(batch)
                self._entries.forget(batch)
            self._buffers.give_back(free)
        for entry in batch:
            if entry.stored or entry.name in self.file:
                self.file.delete(entry.name)

    # -- the end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for all transfers, give up the memory and remove the spill file.

        Parameters that are AVAILABLE keep their data; the values of others are lost. A second time
        does no harm; a forked child does nothing.

        Raises
        ------
        BusyError
            A transfer of somebody else uses the swapper's own pool: wait for it, close again.
        """
        if os.getpid() != self._pid:
            return
        self.file.close()
        with HeldInterrupts(), torch.inference_mode(False):
            self.release_reserved()
            if not self._own_pool:
                with self._entries.lock:
                    free = _detach(self._entries)
                self._buffers.give_back(free)
        if self._own_pool:
            self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.dtype}, budget {self.budget}, {self.file!r}>"

    # -- how it is done --------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self.file.closed:
            raise ClosedError("The swapper is closed")
        if os.getpid() != self._pid:
            raise ClosedError(
                "The swapper belongs to the parent process", remedy="Make one in this process"
            )

    def _look_up(self, parameters: Iterable[Parameter], keep: bool = False) -> list[Entry]:
        self._check_open()
        known = listed(parameters)
        with self._entries.lock:
            batch = self._entries.look_up(known)
            if keep:
                self._entries.keep(batch)
        return batch


def listed(parameters: Iterable[Parameter] | Parameter) -> list[Parameter]:
    """Return parameters as a list; one alone counts as a batch, not as its rows."""
    if isinstance(parameters, torch.Tensor | Swappable):
        return [parameters]
    return [*parameters]


def _detach(entries: Iterable[Entry]) -> list[Buffer]:
    """Give parameters in the swapper's memory some of their own; return what they had."""
    free = []
    for entry in entries:
        if entry.home is not None:
            entry.data = entry.data.clone()
        free += [memory for memory in (entry.home, entry.taken) if memory is not None]
        entry.home = entry.taken = None
    return free
