"""Packs: gradients that are spilled together, in one buffer each."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import CancelledError

import torch

from tensorspill import timeline
from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import CapacityError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.sizes import round_up
from tensorspill.residency.clock import TransferClock
from tensorspill.residency.entry import BUFFER_ALIGNMENT
from tensorspill.spill.file import SpillFile

__all__ = ["Pack", "PackStore", "lay_out"]

#: Gradients begin at multiples of this inside of a pack.
_ALIGNMENT = 64


class Pack:
    """Gradients of some parameters, one behind the other in one buffer.

    Attributes
    ----------
    name : str
        In the spill file.
    offsets : dict of torch.Tensor to int
        Where each parameter's gradient begins.
    nbytes : int
        Of the whole.
    present : set of torch.Tensor
        Parameters that have a gradient.
    buffer : Buffer or None
        Its memory, while it is in memory.
    dirty : bool
        The memory has newer values than the drive.
    transfer : Transfer or None
        That it is part of.
    writing : bool
        Which way that one goes.
    pins : int
        For how many reasons it must stay in memory.
    awaited : bool
        It was read ahead, and not used since.
    """

    __slots__ = (
        "awaited",
        "buffer",
        "dirty",
        "name",
        "nbytes",
        "offsets",
        "pins",
        "present",
        "transfer",
        "writing",
    )

    def __init__(self, name: str, parameters: Sequence[torch.Tensor]) -> None:
        self.name = name
        self.offsets: dict[torch.Tensor, int] = {}
        end = 0
        for parameter in parameters:
            self.offsets[parameter] = end
            end += round_up(parameter.nbytes, _ALIGNMENT)
        self.nbytes = round_up(end, BUFFER_ALIGNMENT)
        self.present: set[torch.Tensor] = set()
        self.buffer: Buffer | None = None
        self.dirty = self.writing = self.awaited = False
        self.transfer: Transfer | None = None
        self.pins = 0

    def view(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a gradient while the pack is in memory."""
        assert self.buffer is not None  # whoever asks has brought it
        begin = self.offsets[parameter]
        flat = self.buffer.tensor[begin : begin + parameter.nbytes].view(parameter.dtype)
        return flat.view(parameter.shape)


def lay_out(parameters: Sequence[torch.Tensor], largest: int) -> list[list[torch.Tensor]]:
    """Divide parameters, in their order, into packs of up to `largest` bytes, or one parameter."""
    packs: list[list[torch.Tensor]] = []
    room = 0
    for parameter in parameters:
        nbytes = round_up(parameter.nbytes, _ALIGNMENT)
        if nbytes > room or packs[-1][0].device != parameter.device:
            packs.append([])
            room = max(largest, nbytes)
        packs[-1].append(parameter)
        room -= nbytes
    return packs


class PackStore:
    """Moves packs between a pool and the spill file; drops those that nobody needs for room.

    Not safe for concurrent use.

    Parameters
    ----------
    file : SpillFile
        Not closed by this object.
    pool : BufferPool
        Not closed by this object, used by nobody else.
    clock : TransferClock
        Told of the transfers.

    Attributes
    ----------
    held : dict of Pack
        Those that take memory, the longest unused first.
    """

    def __init__(self, file: SpillFile, pool: BufferPool, clock: TransferClock) -> None:
        self._file = file
        self.pool = pool
        self._clock = clock
        self.held: dict[Pack, None] = {}
        self.counts = dict.fromkeys(("bytes_in", "bytes_out"), 0)

    def take(self, pack: Pack) -> None:
        """Give a pack that is not in memory a buffer, making room if need be.

        Raises
        ------
        CapacityError
            What is pinned leaves no room.
        SpillError
            An earlier write failed.
        """
        while True:
            try:
                buffer = self.pool.allocate(pack.nbytes)
            except CapacityError:
                if not self._give_way():
                    raise
            else:
                break
        pack.buffer = buffer
        self.held[pack] = None

    def bring(self, pack: Pack) -> None:
        """Bring a pack's gradients into memory, and wait for them.

        Raises
        ------
        CapacityError, SpillError
            As `take`, or the read failed. The pack is where it was.
        """
        if pack.buffer is None:
            self.take(pack)
            self._read(pack)
        self.await_read(pack)
        pack.awaited = False
        self.held[pack] = self.held.pop(pack)

    def ahead(self, pack: Pack) -> None:
        """Begin to read a pack if there is room beside what is used or awaited; never waits."""
        while pack.buffer is None:
            try:
                pack.buffer = self.pool.allocate(pack.nbytes)
            except CapacityError:
                if not self._drop_used():
                    return
            else:
                self.held[pack] = None
                pack.awaited = True
                self._read(pack)

    def _drop_used(self) -> bool:
        for pack in self.held:
            idle = pack.transfer is None or pack.transfer.done()
            if idle and not (pack.pins or pack.dirty or pack.awaited):
                if pack.transfer is not None:
                    self._end(pack)
                if not pack.dirty:
                    self.drop(pack)
                    return True
        return False

    def await_read(self, pack: Pack) -> None:
        """Wait for the read of a pack, if one is under way; raise its error."""
        if pack.transfer is not None and not pack.writing:
            error = self._end(pack)
            if error is not None:
                self.drop(pack)
                raise error

    def await_write(self, pack: Pack) -> None:
        """Wait for the write of a pack, if one is under way, so that it may be changed.

        Raises
        ------
        SpillError
            It failed; the pack is dirty still.
        """
        if pack.transfer is not None and pack.writing:
            error = self._end(pack)
            if error is not None and not isinstance(error, CancelledError):
                raise error

    def settle(self, pack: Pack) -> None:
        """Wait until a pack in memory may be changed; if writing it failed, it is dirty still."""
        if pack.transfer is not None and pack.writing:
            self._end(pack)

    def write(self, pack: Pack) -> None:
        """Begin to write a pack that is in memory.

        Raises
        ------
        SpillError
            It could not be started, or an earlier write failed; it is dirty still.
        """
        self.await_write(pack)
        assert pack.buffer is not None  # only these are dirty
        with HeldInterrupts():
            self._begin(pack, self._file.put({pack.name: pack.buffer}), writing=True)
            pack.dirty = False
            self.counts["bytes_out"] += pack.nbytes

    def drop(self, pack: Pack) -> None:
        """Let go a pack's memory; its newest values must be elsewhere, or not be needed."""
        if pack.transfer is not None:
            self._end(pack)
        buffer, pack.buffer = pack.buffer, None
        pack.dirty = False
        if buffer is not None:
            del self.held[pack]
            buffer.release()

    def _give_way(self) -> bool:
        """Free something that nobody pins; say whether there was any."""
        loose = [pack for pack in self.held if not pack.pins]
        idle = [pack for pack in loose if not pack.dirty]
        ended = [pack for pack in idle if pack.transfer is None or pack.transfer.done()]
        if not loose:
            return False
        if not idle:
            self.write(loose[0])
        pack = (ended or idle or loose)[0]
        self.await_write(pack)
        if not pack.dirty:  # a Ctrl-C may have cancelled the write
            self.drop(pack)
        return True

    def _read(self, pack: Pack) -> None:
        assert pack.buffer is not None  # `take` came before
        try:
            with HeldInterrupts():
                self._begin(pack, self._file.get({pack.name: pack.buffer}), writing=False)
                self.counts["bytes_in"] += pack.nbytes
        except BaseException:
            if pack.transfer is None:
                self.drop(pack)
            raise

    def _begin(self, pack: Pack, transfer: Transfer, *, writing: bool) -> None:
        pack.transfer, pack.writing = transfer, writing
        self._clock.watch(transfer)
        timeline.watch(transfer, "gradients", written=writing)

    def _end(self, pack: Pack) -> BaseException | None:
        """Wait for a pack's transfer; return its error."""
        assert pack.transfer is not None  # whoever asks has looked
        with self._clock.waiting():
            error = pack.transfer.exception()
        pack.transfer = None
        if pack.writing and error is not None:
            pack.dirty = True
        return error
