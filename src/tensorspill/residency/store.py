"""Moving spilled parameters between drive and memory, and keeping the books about it."""

from __future__ import annotations

import bisect
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import CancelledError

import torch

from tensorspill import timeline
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import UnsupportedError
from tensorspill.residency.clock import TransferClock
from tensorspill.residency.entry import Spilled, State
from tensorspill.swap.swapper import ParameterSwapper, SwapStatus

__all__ = ["ParameterStore"]


class ParameterStore:
    """Mechanism without policy: reads, writes and lets go what it is told to.

    Parameters
    ----------
    swapper : ParameterSwapper
        Moves the parameters. Not closed by this object.
    what : str
        They are; what timelines call them.

    Attributes
    ----------
    held : dict of Spilled
        Those that take memory of the pool: all but the ones that are away.
    held_bytes : int
        Bytes they take.
    outside_bytes : int
        Bytes of parameters that the owner keeps in memory beside these.
    peak_bytes : int
        The most that ``held_bytes + outside_bytes`` has been.
    clock : TransferClock
        Of the transfers.
    counts : dict of str to int
        What was done; see `ResidencyStatistics`.
    """

    def __init__(self, swapper: ParameterSwapper, what: str = "parameters") -> None:
        self._swapper = swapper
        self._what = what
        self._transfers: dict[Transfer, list[Spilled]] = {}
        self._starts: list[int] = []
        self._at: dict[int, Spilled] = {}
        self.held: dict[Spilled, None] = {}
        self.held_bytes = self.outside_bytes = self.peak_bytes = 0
        self.clock = TransferClock(what)
        self._complaints: list[UnsupportedError] = []
        self.counts = dict.fromkeys(("evictions", "bytes_in", "bytes_out"), 0)

    @property
    def resident_bytes(self) -> int:
        """Bytes of parameters in memory now."""
        return self.held_bytes + self.outside_bytes

    @property
    def coming_bytes(self) -> int:
        """Bytes that are being read."""
        return sum(entry.nbytes for entry in self.held if entry.state is State.COMING)

    def moved(self) -> tuple[int, float]:
        """Return the bytes moved so far, and the seconds in which transfers were under way."""
        return self.counts["bytes_in"] + self.counts["bytes_out"], self.clock.busy

    def keep_outside(self, nbytes: int) -> None:
        """Note how many bytes of parameters the owner keeps in memory beside these."""
        self.outside_bytes = nbytes
        self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def find(self, address: int) -> Spilled | None:
        """Return the parameter in whose memory `address` lies."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        entry = self._at[self._starts[index]]
        return entry if address < entry.address + entry.parameter.nbytes else None

    # -- moving --------------------------------------------------------------------------------

    def adopt(self, entries: Sequence[Spilled]) -> None:
        """Write parameters that are in ordinary memory to the drive, and let go that memory.

        Those that the swapper has on the drive already are taken over.

        Raises
        ------
        CapacityError, BrokenError
            They could not be written, and are as they were.
        """
        away = SwapStatus.NOT_AVAILABLE
        parameters = [e.parameter for e in entries if self._swapper.status(e.parameter) is not away]
        if parameters:
            transfer = self._swapper.swap_out(parameters, wait=False, release=True)
            try:
                transfer.result()
            except BaseException:
                if transfer.exception() is None:  # a Ctrl-C came too late to stop it
                    self.give_up(entries)
                raise
        for entry in entries:
            entry.away = entry.parameter.data

    def give_up(self, entries: Iterable[Spilled]) -> None:
        """Bring parameters that are away back to ordinary memory for good, one after the other.

        Raises
        ------
        BrokenError, CorruptError
            One could not be read; it and those after it are as they were.
        """
        for entry in entries:
            parameter = entry.parameter
            if self._swapper.status(parameter) is SwapStatus.NOT_AVAILABLE:
                with torch.inference_mode(False):
                    memory = torch.empty(
                        parameter.shape, dtype=parameter.dtype, device=parameter.device
                    )
                self._swapper.swap_in([parameter], wait=True, buffers=[memory])
            self._swapper.forget([parameter])

    def drop(self, entries: Iterable[Spilled]) -> None:
        """Give back the room, in memory and on the drive, of what nobody needs any more.

        Nothing of it may be pinned. What is dropped is a placeholder from now on.
        """
        for entry in entries:
            self.outcome(entry)
            if entry.state is State.HERE:
                entry.dirty = False
                self.evict([entry])
            self._swapper.forget([entry.parameter], lose=True)

    def read(self, entries: Sequence[Spilled]) -> None:
        """Begin to read parameters that are away; they are COMING.

        Raises
        ------
        CapacityError
            The pool has no room for all of them; nothing changed.
        UnsupportedError
            One was given other data meanwhile; its placeholder is back, and the drive's value
            counts.
        """
        for entry in entries:
            if entry.away is not None and not _same_place(entry.parameter, entry.away):
                entry.parameter.data = entry.away
                raise _replaced(entry)
        begun = time.perf_counter()
        with HeldInterrupts():
            transfer = self._swapper.swap_in([e.parameter for e in entries], wait=False)
            self._begin(transfer, entries, State.COMING, begun)
            for entry in entries:
                self.held[entry] = None
                self.held_bytes += entry.nbytes
                self.counts["bytes_in"] += entry.parameter.nbytes
            self.peak_bytes = max(self.peak_bytes, self.resident_bytes)

    def write(self, entries: Sequence[Spilled]) -> None:
        """Begin to write parameters that are in memory; they are GOING, and stay.

        Where an older value is being written, that is awaited first.

        Raises
        ------
        CapacityError, BrokenError
            The write could not be started; they are dirty still.
        """
        for entry in entries:
            self.outcome(entry)
        if not entries:
            return
        begun = time.perf_counter()
        parameters = [entry.parameter for entry in entries]
        with HeldInterrupts():
            transfer = self._swapper.swap_out(parameters, wait=False, release=False)
            self._begin(transfer, entries, State.GOING, begun)
            for entry in entries:
                entry.dirty = entry.stuck = False
                entry.version = entry.parameter._version
                self.counts["bytes_out"] += entry.parameter.nbytes

    def evict(self, entries: Sequence[Spilled]) -> None:
        """Let go the memory of parameters that are HERE."""
        for entry in entries:
            self.take_replaced(entry)
        entries = [entry for entry in entries if not entry.dirty]
        if not entries:
            return
        with HeldInterrupts():
            self._swapper.release([e.parameter for e in entries])
            for entry in entries:
                del self._at[entry.address]
                del self._starts[bisect.bisect_left(self._starts, entry.address)]
                entry.away = entry.parameter.data
                self._left(entry)
            self.counts["evictions"] += len(entries)

    def take_replaced(self, entry: Spilled) -> None:
        """Take over the value of a parameter in memory that was given other data.

        Data of another shape, dtype or device is refused at the next `collect`; the value is then
        what it was.
        """
        memory, data = entry.memory, entry.parameter.data
        if memory is None or _same_place(data, memory):
            return
        self.outcome(entry)
        with torch.inference_mode(False), torch.no_grad():
            entry.parameter.data = memory
            if (data.shape, data.dtype, data.device) == (memory.shape, memory.dtype, memory.device):
                memory.copy_(data)
                entry.dirty, entry.stuck = True, False
            else:
                self._complaints.append(_replaced(entry))

    # -- transfers -----------------------------------------------------------------------------

    def outcome(self, entry: Spilled) -> BaseException | None:
        """Wait for the transfer that an entry is part of, if any, and return its error."""
        if entry.transfer is None:
            return None
        with self.clock.waiting():
            entry.transfer.exception()
        return self._conclude(entry.transfer)

    def collect(self, *, wait: bool = False) -> None:
        """Take note of the transfers that have ended, or of all of them if `wait`.

        Raises
        ------
        SpillError
            A write failed; its parameters are dirty still. That a read failed is not raised, nor
            that a Ctrl-C has cancelled a write: these are tried again.
        UnsupportedError
            A parameter was given data that can't be its value.
        """
        if wait:
            with self.clock.waiting():
                for transfer in self._transfers:
                    transfer.exception()
        errors: list[BaseException] = [*self._complaints]
        self._complaints.clear()
        for transfer in [t for t in self._transfers if t.done()]:
            writing = self._transfers[transfer][0].state is State.GOING
            error = self._conclude(transfer)
            if error is not None and writing and not isinstance(error, CancelledError):
                errors.append(error)
        if errors:
            raise errors[0]

    def _begin(
        self, transfer: Transfer, entries: Sequence[Spilled], state: State, begun: float
    ) -> None:
        self._transfers[transfer] = list(entries)
        for entry in entries:
            entry.state, entry.transfer = state, transfer
        self.clock.watch(transfer, begun)
        timeline.watch(transfer, self._what, written=state is State.GOING)

    def _conclude(self, transfer: Transfer) -> BaseException | None:
        error = transfer.exception(0)
        with HeldInterrupts():
            for entry in self._transfers.pop(transfer):
                entry.transfer = None
                if entry.state is State.COMING:
                    self._arrived(entry, error)
                else:
                    entry.state = State.HERE
                    entry.dirty = entry.dirty or error is not None
                    entry.stuck = error is not None and not isinstance(error, CancelledError)
        return error

    def _arrived(self, entry: Spilled, error: BaseException | None) -> None:
        if error is not None:
            self._left(entry)
            return
        entry.state = State.HERE
        entry.version = entry.parameter._version
        entry.memory, entry.away = entry.parameter.data, None
        self._at[entry.address] = entry
        bisect.insort(self._starts, entry.address)

    def _left(self, entry: Spilled) -> None:
        entry.state, entry.memory = State.AWAY, None
        del self.held[entry]
        self.held_bytes -= entry.nbytes


def _same_place(data: torch.Tensor, memory: torch.Tensor) -> bool:
    return data.data_ptr() == memory.data_ptr() and data.dtype is memory.dtype


def _replaced(entry: Spilled) -> UnsupportedError:
    return UnsupportedError(
        f"Parameter {entry.name} was given other data while its value is in the spill file",
        remedy="Cast and move a model before it is offloaded; change values inside of `updating`",
    )
