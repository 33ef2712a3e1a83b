"""The GDS engine: bytes between drives and GPU memory by kvikio and cuFile."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.engine.batch import Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.options import Resolved
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import UnsupportedError
from tensorspill.gds import evidence, settings
from tensorspill.gds.cutting import allocations, cut, join
from tensorspill.gds.evidence import Evidence
from tensorspill.gds.fallback import Fallback
from tensorspill.gds.feeders import FEEDERS, Feeders
from tensorspill.gds.file import GdsFile, Way, open_file
from tensorspill.gds.options import GdsOptions
from tensorspill.gds.part import Part
from tensorspill.gds.paths import classify
from tensorspill.gds.progress import Progress
from tensorspill.gds.streaming import Streams
from tensorspill.pool.cuda.contexts import current, normal_device
from tensorspill.pool.cuda.memory import is_owned
from tensorspill.pool.cuda.registration import Registrations

__all__ = ["GdsEngine"]

Table = NDArray[Any]

#: What part of an allocation that is not ours has to be moved for its registration to pay.
WORTH_REGISTERING = 0.5

#: Small operations that are worth a thread of their own.
SMALL = 16


class GdsEngine(Engine):
    """GPUDirect Storage through kvikio's file handles.

    Requests that are neighbours in memory and file become one, long ones are cut, and every piece
    is one task of kvikio's threads, so that a batch of many small tensors keeps them as busy as a
    large one. Where cuFile can, and the caller's stream is busy, streams run the pieces instead.

    Parameters
    ----------
    folder : str or path
        Must exist.
    device : torch.device
        A GPU.
    options : Resolved of GdsOptions
    host : callable, optional
        Opens the engine that moves a file's bytes once GPUDirect Storage failed on the file.
        Without it such a failure is raised.

    Raises
    ------
    UnsupportedError
        There is no CUDA driver or GPU, kvikio is missing or too old, or cuFile can't be used.
    """

    name = "gds"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: torch.device,
        options: Resolved[GdsOptions],
        host: Callable[[], Engine] | None = None,
    ) -> None:
        if device.type != "cuda":
            raise UnsupportedError(f"The GDS engine serves GPUs, not {device}")
        _check(evidence.missing())
        super().__init__(folder, normal_device(device), options)
        index = self.device.index
        values = options.values
        found = None if values.compat == "yes" else evidence.find(self.folder, index)
        _check(found)
        self._in_host_memory = found is None or found.route == "compat"
        self._fallback = Fallback(host)
        self._streams = Streams(
            index, values.stream_ordered, found is not None and found.streams, self._ledger.note
        )
        self._feeders = Feeders(index, values.depth, self.folder)
        self._registrations = Registrations(values.registered_bytes)
        self._opened: weakref.WeakSet[GdsFile] = weakref.WeakSet()
        lease = settings.Lease(values)
        self._way = Way(_modes(values, found), values.direct, self._ledger, self._fallback)
        for line in ([] if found is None else [found.why]) + lease.overruled():
            self._ledger.note(line)
        held = (self._streams, self._fallback, self._registrations, lease)
        self._finalizer = weakref.finalize(
            self, _shut_down, self._ledger, self._feeders, self._opened, held
        )

    def _open(self, name: str, flags: int, size: int | None) -> GdsFile:
        file = open_file(self._folder, name, flags, size, self._way)
        self._opened.add(file)
        return file

    def _start(self, batch: Batch, transfer: Transfer) -> None:
        progress = Progress(self._ledger, transfer)
        try:
            parts = self._parts(batch, transfer, progress)
            progress.expect(len(parts))
            self._feeders.put(parts)
        except BaseException as error:
            progress.expect(1)
            progress.part_ended(error)
            raise

    def _parts(self, batch: Batch, transfer: Transfer, progress: Progress) -> list[Part]:
        options = self.options.values
        files = cast(tuple[GdsFile, ...], batch.files)
        compat = np.array([self._in_host_memory or file.is_compat for file in files])
        requests = batch.table[batch.table["nbytes"] > 0]
        with current(self.device.index):
            allocation, ranges = allocations(requests)
        registered = np.zeros(len(ranges), np.bool_)
        if not compat.all():
            moved = np.bincount(allocation, requests["nbytes"], len(ranges))
            registered = self._register(ranges, moved, batch, progress)
        requests, allocation = join(requests, allocation)
        operations, origin = cut(requests, options.block_bytes)
        path = classify(
            operations,
            compat[operations["file"]],
            registered[allocation[origin]],
            options.threshold_bytes,
        )
        rest = (batch, transfer.ready, progress)
        if (streamed := self._streams.take(operations, path, rest, transfer)) is not None:
            return [streamed]
        small = int((operations["nbytes"] < options.threshold_bytes).sum())
        count = max(1, min(FEEDERS, small // SMALL))
        return [
            Part(rows, ways, *rest)
            for rows, ways in zip(
                np.array_split(operations, count), np.array_split(path, count), strict=True
            )
        ]

    def _register(
        self, ranges: list[tuple[int, int]], moved: Table, batch: Batch, progress: Progress
    ) -> Table:
        """Register allocations with cuFile while the transfer lasts; return which of them are.

        Ours stay registered beyond that. Those of others don't, since nobody tells when they are
        freed, so that it is worth the while only where much of an allocation is moved.
        """
        registered = np.zeros(len(ranges), np.bool_)
        for number, (base, nbytes) in enumerate(ranges):
            if is_owned(base) or moved[number] >= nbytes * WORTH_REGISTERING:
                hold = self._registrations.hold(base, self.device.index, batch)
                if hold is not None:
                    progress.at_end(hold.release)
                    registered[number] = True
        return registered

    def _release(self) -> None:
        self._finalizer()

    def _extra(self) -> dict[str, Any]:
        return {
            "staging_bytes": self._fallback.staging_bytes,
            "fallbacks": self._fallback.files,
        }


def _check(found: Evidence | None) -> None:
    """Raise if there is evidence that kvikio can't be used."""
    if found is not None and not found.usable:
        raise UnsupportedError(f"There is {found.why}", remedy=found.remedy or None)


def _modes(options: GdsOptions, found: Evidence | None) -> tuple[bool, ...]:
    """Return in which modes of kvikio files are opened, in order of preference."""
    mode = {"yes": "on", "no": "off"}.get(options.compat) or settings.compat_mode()
    if mode == "auto":
        no_cufile = found is not None and found.report.get("mode", "compat")
        return (True,) if no_cufile else (False, True)
    return (mode == "on",)


def _shut_down(
    ledger: Ledger, feeders: Feeders, opened: weakref.WeakSet[GdsFile], held: tuple[Any, ...]
) -> None:
    """Drain and let go, also when the engine is collected or the interpreter ends."""
    if ledger.forked:
        return
    if feeders.is_current:
        # Collected in a feeder, which can't wait for itself.
        threading.Thread(target=_shut_down, args=(ledger, feeders, opened, held)).start()
        return
    ledger.close()
    ledger.wait_idle()
    feeders.stop()
    # Not later: libcufile is known to crash when it is called as the process ends.
    for file in list(opened):
        file.forget_handle()
    for holder in held:
        holder.close()
