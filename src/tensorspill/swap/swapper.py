"""The parameter swapper: parameters that live on a drive and visit memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from tensorspill.engine.interrupts import HeldInterrupts
from tensorspill.engine.transfer import Transfer, gather
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.spill.file import Folder
from tensorspill.swap.casts import cast_in_waves, check_sources
from tensorspill.swap.core import SwapperCore, listed
from tensorspill.swap.entries import Entry, Parameter, Swappable, check_status, check_stored
from tensorspill.swap.jobs import Reading, Writing
from tensorspill.swap.status import SwapperStatistics, SwapStatus

__all__ = ["ParameterSwapper", "SwapStatus", "Swappable", "SwapperStatistics"]

Job = TypeVar("Job", Reading, Writing)


class ParameterSwapper(SwapperCore):
    """Parameters that live in a spill file and come into a budget of memory when they are needed.

    Works with `torch.nn.Parameter` and any other tensor, and with objects that have an ``id``, a
    ``numel`` and a ``tensor`` (see `Swappable`). The swapper keeps the parameters whose values it
    has, see `forget`.

    A batch is atomic: all of it is INFLIGHT, or, if the call raises, nothing has changed. If a
    transfer fails or is cancelled, the parameters are what they were before it, and no memory is
    lost. While a parameter is INFLIGHT its memory must not be changed, and not be used at all if
    it is being read or will be released.

    A parameter that is NOT_AVAILABLE has a placeholder as its data: of its shape, without memory,
    and NaN in all places where the dtype has one.

    May be used from any thread, but not from the callback of a transfer. A forked child can't use
    it.

    Parameters
    ----------
    folder : str, path, or sequence of these
        See `SpillFile`.
    dtype : torch.dtype or None
        Of all parameters; None for each parameter's own.
    budget : int or str
        Bytes of memory for parameters: each takes its own size, rounded up to 4096.
    min_bytes : int or str
        What `swappable` calls large enough.
    verify : bool
        Keep a digest of every parameter, and check it whenever one is read.
    device, backend
        See `SpillFile`.
    pool : BufferPool, optional
        Memory to use in place of a pool of the swapper's own; the budget is then its capacity. It
        is not closed with the swapper.
    capacity : int or str, optional
        See `SpillFile`.
    **options
        Of the engines, see `open_engine`.

    Attributes
    ----------
    dtype : torch.dtype or None
    budget, min_bytes : int
        In bytes.
    file : SpillFile
        Where the values are, under names of the swapper's own. Closed with the swapper.
    pool : BufferPool
        Where the memory comes from.

    Raises
    ------
    SpillError
        As `SpillFile` and `BufferPool` do; nothing is left behind.

    Examples
    --------
    >>> with ParameterSwapper("/mnt/nvme", dtype=torch.float32) as swapper:  # doctest: +SKIP
    ...     swapper.swap_out(model.parameters())
    ...     swapper.swap_in(block.parameters()).result()
    """

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
        super().__init__(
            folder,
            dtype,
            budget,
            min_bytes=min_bytes,
            verify=verify,
            device=device,
            backend=backend,
            pool=pool,
            capacity=capacity,
            **options,
        )
        self._reads: list[Transfer] = []
        self._writes: list[Transfer] = []

    def swap_out(
        self, parameters: Iterable[Parameter], wait: bool = True, release: bool = True
    ) -> Transfer:
        """Write parameters to the drive.

        Parameters
        ----------
        parameters : iterable of Parameter
            Each AVAILABLE, or with a buffer from `get_buffer` that was filled.
        wait : bool
            Return when they are written.
        release : bool
            Give their memory back: their data is a placeholder from the call on, and they are
            NOT_AVAILABLE at the end. Else they stay what they are and are AVAILABLE at the end.

        Raises
        ------
        BusyError, UnsupportedError
            A parameter is INFLIGHT or NOT_AVAILABLE, has another dtype or number of elements than
            the swapper or the stored value, is not contiguous, or is named twice.
        CapacityError, NoSpaceError
            The spill file has no room.
        BrokenError
            With `wait`: writing failed.
        ClosedError
        """
        job = Writing(self._entries, self._buffers, release)
        transfer = self._begin(job, parameters, lambda: None, self.file.begin_put)
        return self._wait_or_note(transfer, wait, self._writes)

    def swap_in(
        self,
        parameters: Iterable[Parameter],
        wait: bool = False,
        buffers: Sequence[Buffer | torch.Tensor] | None = None,
    ) -> Transfer:
        """Read parameters into memory; they are AVAILABLE at the end.

        Parameters
        ----------
        parameters : iterable of Parameter
            Each NOT_AVAILABLE.
        wait : bool
            Return when they are read.
        buffers : sequence of Buffer or torch.Tensor, optional
            Memory for each, contiguous, of its dtype and at least its number of elements. It stays
            the caller's: it must live until the parameter is swapped out or released.

        Raises
        ------
        CapacityError
            There is no memory for all of them.
        BusyError, UnsupportedError
            A parameter is INFLIGHT or AVAILABLE or named twice, or a buffer does not fit.
        MissingNameError
            One was never written.
        BrokenError, CorruptError
            With `wait`: reading failed.
        ClosedError
        """
        job = Reading(self._entries, self._buffers)
        transfer = self._begin(job, parameters, lambda: job.provide(buffers), self.file.begin_get)
        return self._wait_or_note(transfer, wait, self._reads)

    def swap_into(
        self, parameter: Parameter, destination: torch.Tensor | Buffer, wait: bool = True
    ) -> Transfer:
        """Read the stored value of a parameter into any memory; its status does not matter.

        Parameters
        ----------
        parameter : Parameter
        destination : torch.Tensor or Buffer
            Contiguous, of the stored dtype and number of elements.
        wait : bool
            Return when it is read.

        Raises
        ------
        MissingNameError
            The parameter was never written.
        UnsupportedError
            The destination does not match.
        BrokenError, CorruptError
            With `wait`: reading failed.
        ClosedError
        """
        self._check_open()
        with self._entries.lock:
            (entry,) = self._entries.look_up([parameter])
            # One that is being written for the first time is awaited by the spill file.
            if not entry.stored and entry.status is not SwapStatus.INFLIGHT:
                check_stored([entry])
        transfer = self.file.get({entry.name: destination})
        return self._wait_or_note(transfer, wait, self._reads)

    def cast_and_write(
        self,
        parameters: Iterable[Parameter],
        sources: Iterable[torch.Tensor],
        wait: bool = True,
    ) -> Transfer:
        """Cast tensors to the parameters' dtype and make that their value on the drive.

        What an optimizer step does with its fp32 masters. Parameters that are NOT_AVAILABLE are
        cast in buffers, in as many waves as the memory needs, and stay NOT_AVAILABLE; those that
        are AVAILABLE are cast in place, and stay AVAILABLE.

        Parameters
        ----------
        parameters, sources : iterables of the same length
            A source has as many elements as its parameter, in any dtype and layout.
        wait : bool
            Return when all are written, else when all are cast.

        Raises
        ------
        BusyError, UnsupportedError
            A parameter is INFLIGHT or named twice, or a source does not match. Nothing changed.
        CapacityError, NoSpaceError
            There is no memory for even one parameter, or no room in the spill file.
        BrokenError
            Writing failed.
        ClosedError
            Closed, or a forked child.

        After the last four each parameter has either its new value or its old one on the drive;
        what was cast in place has the new one in memory.
        """
        tensors = [*sources]
        batch = self._look_up(parameters, keep=True)
        check_sources(batch, tensors)
        check_status(batch, SwapStatus.AVAILABLE, SwapStatus.NOT_AVAILABLE)

        def write(wave: list[Entry]) -> Transfer:
            job = Writing(self._entries, self._buffers, None)
            owners = [entry.owner for entry in wave]
            return self._begin(job, owners, lambda: None, self.file.begin_put)

        waves: list[Transfer] = []
        try:
            cast_in_waves(batch, tensors, self._buffers, write, waves)
        except BaseException:
            self._writes.extend(waves)
            raise
        return self._wait_or_note(gather(waves), wait, self._writes)

    def wait_reads(self) -> None:
        """Wait for all reads that were begun with ``wait=False``.

        Raises
        ------
        SpillError
            The first that failed since the last call, after all have ended.
        """
        _wait_for(self._reads)

    def wait_writes(self) -> None:
        """Wait for all writes that were begun with ``wait=False``.

        Raises
        ------
        SpillError
            The first that failed since the last call, after all have ended.
        """
        _wait_for(self._writes)

    # -- how it is done --------------------------------------------------------------------------

    def _begin(
        self,
        job: Job,
        parameters: Iterable[Parameter],
        provide: Callable[[], None],
        begin: Callable[[dict[str, torch.Tensor], Job], Transfer],
    ) -> Transfer:
        """Mark a batch, provide memory, and begin its transfer; all of it or nothing."""
        self._check_open()
        batch = listed(parameters)
        try:
            with HeldInterrupts(), torch.inference_mode(False):
                with self._entries.lock:
                    job.begin(self._entries.look_up(batch))
                provide()
            return begin(job.tensors, job)
        except BaseException:
            with HeldInterrupts(), torch.inference_mode(False):
                job.withdraw()
            raise

    def _wait_or_note(self, transfer: Transfer, wait: bool, noted: list[Transfer]) -> Transfer:
        if wait:
            transfer.result()
        else:
            # Failures stay until somebody waits for them.
            noted[:] = [t for t in noted if not t.done() or t.exception(0) is not None]
            noted.append(transfer)
        return transfer


def _wait_for(transfers: list[Transfer]) -> None:
    first: BaseException | None = None
    while transfers:
        error = transfers[0].exception()
        del transfers[0]
        first = first or error
    if first is not None:
        raise first
