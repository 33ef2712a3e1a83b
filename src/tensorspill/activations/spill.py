"""Saved tensors on the drive: from when forward has made them until backward needs them."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import torch

from tensorspill import saved_tensors
from tensorspill.activations.selection import (
    Span,
    belongs_to_a_parameter,
    fills_its_memory,
    span_of,
)
from tensorspill.activations.statistics import ActivationStatistics
from tensorspill.activations.stored import StoredRange, StoredTensor
from tensorspill.activations.traffic import Traffic
from tensorspill.activations.watches import StorageWatch, VersionWatch, bytes_of
from tensorspill.errors import ClosedError
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.sizes import parse_bytes, round_down
from tensorspill.spill.file import Folder, SpillFile

__all__ = ["ActivationSpill", "activation_spill"]


class ActivationSpill:
    """Context manager: what autograd saves inside of it goes to the drive until backward needs it.

    As much as the budget allows stays in memory instead: what was saved last, which backward needs
    first.

    Made by `activation_spill`; may be entered again and again, in several threads, and inside of
    others. Backward may run inside or after. Works together with `Residency`, which keeps what is
    its own, and with `torch.utils.checkpoint`: inside of a checkpointed function nothing is saved,
    so nothing is spilled there; what a checkpoint keeps to start again from is spilled.

    Results are the same to the last bit. A saved tensor that is changed in place is found out when
    backward needs it, as autograd does.

    Attributes
    ----------
    min_bytes, budget : int
    """

    def __init__(
        self,
        folder: Folder | Sequence[Folder],
        *,
        min_bytes: int | str = "1MiB",
        budget: int | str = "1GiB",
        device: str | torch.device = "cpu",
        verify: bool = False,
        backend: str = "auto",
        capacity: int | str | None = None,
        **options: Any,
    ) -> None:
        self.min_bytes = max(parse_bytes(min_bytes), 1)
        self.budget = parse_bytes(budget)
        reading = max(round_down(_for_reading(self.budget), 4096), 4096)
        pool = BufferPool(reading, device)
        try:
            file = SpillFile(folder, capacity, device, backend, verify, **options)
        except BaseException:
            pool.close()
            raise
        self._traffic = Traffic(file, pool, self.budget - reading)
        self._lock = threading.RLock()
        self._local = threading.local()
        self._serials = itertools.count()
        self._sources: dict[int, tuple[StorageWatch, list[weakref.ref[StoredRange]]]] = {}
        #: Memory that others kept until backward: spilling it again would save nothing.
        self._kept: dict[int, StorageWatch] = {}
        self._counts = dict.fromkeys(("tensors", "ranges", "left"), 0)
        self._closed = False
        self._pid = os.getpid()

    # -- the context -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Take what autograd saves in this thread from now on."""
        self._check_process()
        if self._closed:
            raise ClosedError("The activation spill is closed")
        entered: list[saved_tensors.HandlerHooks | None] = self._entered
        if _inside_a_checkpoint():
            entered.append(None)
            return self
        hooks = saved_tensors.hooks(self, last=True)
        hooks.__enter__()
        entered.append(hooks)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Take nothing any more; what was taken stays where it is.

        Raises
        ------
        BrokenError
            A write failed. Its tensor is still in memory, so backward can run.
        """
        hooks = self._entered.pop()
        if hooks is not None:
            hooks.__exit__()
        if error is None and os.getpid() == self._pid:
            with self._lock:
                self._traffic.sweep()
                self._traffic.writing.raise_error()

    @property
    def _entered(self) -> list[saved_tensors.HandlerHooks | None]:
        if not hasattr(self._local, "entered"):
            self._local.entered = []
        entered: list[saved_tensors.HandlerHooks | None] = self._local.entered
        return entered

    # -- saved tensors ---------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> StoredTensor | None:
        """Return what autograd keeps in place of a tensor (see `saved_tensors.Handler`).

        Raises
        ------
        CapacityError, BrokenError
            The file is full, or a drive failed: now, or while an earlier tensor was written. What
            was taken before is still there.
        """
        # What backward itself saves is needed at once: a recomputed forward, mostly.
        if torch._C._current_graph_task_id() != -1:
            return None
        span = span_of(tensor, self._traffic.file.device)
        if span is None or span.nbytes < self.min_bytes:
            return None
        self._check_process()
        with self._lock, torch.no_grad():
            if self._closed:
                return None
            if belongs_to_a_parameter(tensor) or self._is_kept(tensor):
                self._counts["left"] += 1
                return None
            self._counts["tensors"] += 1
            version = VersionWatch(tensor)
            return StoredTensor(
                tensor, version, self._range_for(tensor, span, version), self._bring
            )

    def _range_for(self, tensor: torch.Tensor, span: Span, version: VersionWatch) -> StoredRange:
        """Return the range that has a tensor's bytes, stored before or from now on."""
        storage = tensor.untyped_storage()
        watch = StorageWatch(storage)
        shareable = fills_its_memory(tensor)
        if shareable:
            if (known := self._find(watch, tensor, span)) is not None:
                return known
            if 2 * span.nbytes >= storage.nbytes():  # other views may need the rest
                span = Span(0, storage.nbytes())
        one = StoredRange(
            next(self._serials),
            bytes_of(storage, *span),
            span.begin,
            watch,
            version,
            self._traffic.dropped,
        )
        self._traffic.hold(one)
        self._counts["ranges"] += 1
        if shareable:
            self._remember(watch, one)
        return one

    def _find(self, watch: StorageWatch, tensor: torch.Tensor, span: Span) -> StoredRange | None:
        known = self._sources.get(watch.key)
        if known is None or known[0].gone:
            return None
        found = (reference() for reference in known[1])
        return next((one for one in found if one is not None and one.holds(tensor, *span)), None)

    def _remember(self, watch: StorageWatch, one: StoredRange) -> None:
        known = self._sources.get(watch.key)
        if known is None or known[0].gone:
            known = self._sources[watch.key] = (watch, [])
        known[1][:] = [reference for reference in known[1] if reference() is not None]
        known[1].append(weakref.ref(one))
        if len(self._sources) > 256:
            self._forget_what_is_gone()

    def _forget_what_is_gone(self) -> None:
        for key in [key for key, (watch, _) in self._sources.items() if watch.gone]:
            del self._sources[key]
        for key in [key for key, watch in self._kept.items() if watch.gone]:
            del self._kept[key]

    def _is_kept(self, tensor: torch.Tensor) -> bool:
        if not self._kept:
            return False
        watch = self._kept.get(tensor.untyped_storage()._cdata)
        return watch is not None and not watch.gone

    def _bring(self, one: StoredRange) -> torch.Tensor:
        self._check_process()
        with self._lock:
            if self._closed:
                if one.memory is None:
                    raise ClosedError("The activation spill was closed before backward")
                return one.memory
            memory = self._traffic.bring(one)
            if one.stored and memory.data_ptr() == one.source.address + one.begin:
                self._kept[one.source.key] = one.source
            return memory

    # -- the rest --------------------------------------------------------------------------------

    def statistics(self) -> ActivationStatistics:
        """Return what was done so far; works after `close` as well."""
        with self._lock:
            traffic = self._traffic
            if not self._closed:
                traffic.sweep()
            return ActivationStatistics(
                live_bytes=traffic.live_bytes,
                held_bytes=traffic.writing.held_bytes,
                most_held_bytes=traffic.writing.most_held_bytes,
                bytes_out=traffic.writing.bytes_out,
                transfer_seconds=traffic.clock.busy,
                stalled_seconds=traffic.clock.stalled,
                pool=traffic.pool.statistics(),
                file=traffic.file.statistics(),
                **self._counts,
                **traffic.counts,
            )

    def close(self) -> None:
        """Wait for transfers, give up the memory and remove the spill file.

        What is on the drive only is lost: backward through it raises `ClosedError`. A second time
        does no harm. One that is dropped, and whose saved tensors are, removes its file as well.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            self._traffic.file.close()
            self._traffic.pool.close()

    def _check_process(self) -> None:
        """Raise `ClosedError` in a forked child, where nobody may ever let go of the lock."""
        if os.getpid() != self._pid:
            raise ClosedError(
                "The activation spill belongs to the parent process",
                remedy="Make one in this process",
            )


def activation_spill(
    folder: Folder | Sequence[Folder],
    *,
    min_bytes: int | str = "1MiB",
    budget: int | str = "1GiB",
    device: str | torch.device = "cpu",
    verify: bool = False,
    backend: str = "auto",
    capacity: int | str | None = None,
    **options: Any,
) -> ActivationSpill:
    """Return a context manager in which tensors that autograd saves go to the drive.

    Those beyond the budget are written while forward goes on, the oldest first, and read back ahead
    of backward. Parameters, views of parameters and what others keep in memory anyway are left
    alone; tensors that share memory are stored once.

    Parameters
    ----------
    folder : str, path, or sequence of these
        See `SpillFile`.
    min_bytes : int or str
        Smaller tensors stay in memory.
    budget : int or str
        Bytes of memory for all of these tensors, while they wait, are written, or were read. The
        larger it is, the less is written and read. An eighth is for those that were read; of small
        budgets 32 MiB, but at most half.
    device : str or torch.device
        Tensors elsewhere are left alone.
    verify : bool
        Keep a digest of each, and check it when it is read.
    backend, capacity
        See `SpillFile`.
    **options
        Of the engines, see `open_engine`.

    Raises
    ------
    SpillError
        As `SpillFile` and `BufferPool` do; nothing is left behind.

    Examples
    --------
    Made once, entered for each step's forward:

    >>> spill = activation_spill("/mnt/nvme", budget="2GiB")  # doctest: +SKIP
    >>> for batch in data:
    ...     with spill:
    ...         loss = model(batch)
    ...     loss.backward()
    >>> spill.close()
    """
    return ActivationSpill(
        folder,
        min_bytes=min_bytes,
        budget=budget,
        device=device,
        verify=verify,
        backend=backend,
        capacity=capacity,
        **options,
    )


def _for_reading(budget: int) -> int:
    """Return how much of a budget is for ranges that were read.

    What is read is needed soon: an eighth lets large drives run ahead far enough, if that is not
    less than a few tensors.
    """
    return min(budget // 2, max(budget // 8, 32 << 20))


def _inside_a_checkpoint() -> bool:
    """Whether activation checkpointing keeps all that is saved here from being kept."""
    pair = saved_tensors.foreign_pair()
    return pair is not None and pair[0].__module__ == "torch.utils.checkpoint"
