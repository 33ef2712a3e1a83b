"""The AIO engine: Linux asynchronous I/O with O_DIRECT, for tensors in host memory."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch

from tensorspill.engine.batch import Batch
from tensorspill.engine.engine import Engine
from tensorspill.engine.ledger import Ledger
from tensorspill.engine.options import Resolved
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import UnsupportedError
from tensorspill.host_fallback.file import AioFile, open_file
from tensorspill.host_fallback.job import Job, Progress, split
from tensorspill.host_fallback.layout import FILE
from tensorspill.host_fallback.options import AioOptions
from tensorspill.host_fallback.worker import Worker

__all__ = ["BUFFERED_THREADS", "AioEngine"]

#: Threads for files without O_DIRECT, where each waits in pread or pwrite.
BUFFERED_THREADS = 4


class AioEngine(Engine):
    """Linux AIO through the kernel's own system calls.

    A batch becomes one stream of blocks, so that many small tensors keep the queue as full as one
    large one. Bytes that O_DIRECT can take move straight from the caller's memory; see
    `tensorspill.host_fallback.segments` for the rest.

    Parameters
    ----------
    folder : str or path
        Must exist.
    device : torch.device
        The CPU.
    options : Resolved of AioOptions
    """

    name = "aio"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: torch.device,
        options: Resolved[AioOptions],
    ) -> None:
        if device.type != "cpu":
            raise UnsupportedError(f"The AIO engine serves host memory, not {device}")
        super().__init__(folder, device, options)
        self._workers: list[Worker] = []
        self._hiring = threading.Lock()
        self._turn = 0
        self._finalizer = weakref.finalize(self, _shut_down, self._ledger, self._workers)

    def _open(self, name: str, flags: int, size: int | None) -> AioFile:
        return open_file(self._folder, name, flags, size, self.options.values, self._ledger)

    def _start(self, batch: Batch, transfer: Transfer) -> None:
        progress = Progress(self._ledger, batch, transfer)
        transfer.on_cancel(progress.stop)
        try:
            jobs = self._jobs(batch, progress)
            workers = self._hire(len(jobs))
        except BaseException as error:
            progress.part_ended(error, ())
            raise
        progress.expect(len(jobs))
        for worker, job in zip(workers, jobs, strict=True):
            worker.put(job)

    def _jobs(self, batch: Batch, progress: Progress) -> list[Job]:
        table = np.array([_row(file) for file in cast(Sequence[AioFile], batch.files)], FILE)
        requests = batch.table
        if not requests["nbytes"].all():
            requests = requests[requests["nbytes"] > 0]
        return [Job(part, table.copy(), progress) for part in self._parts(requests, table)]

    def _parts(self, requests: np.ndarray[Any, Any], files: np.ndarray[Any, Any]) -> list[Any]:
        """Divide a batch among threads; more of them wait where there is no O_DIRECT."""
        options = self.options.values
        threads = options.threads
        if self.options.sources["threads"] == "default" and (files["direct"] < 0).any():
            threads = BUFFERED_THREADS
        if threads == 1:
            return [requests]
        return split(requests, threads, options.block_bytes)

    def _hire(self, count: int) -> list[Worker]:
        """Return `count` running workers, in turn, so that small batches spread as well."""
        with self._hiring:
            wanted = max(count, self.options.values.threads)
            while len(self._workers) < wanted:
                name = f"tensorspill-aio-{len(self._workers)}"
                self._workers.append(Worker(name, self.options.values, self._ledger))
            chosen = [self._workers[(self._turn + i) % wanted] for i in range(count)]
            for worker in chosen:
                worker.start()
            self._turn = (self._turn + count) % wanted
        return chosen

    @property
    def is_current(self) -> bool:
        """Whether the caller runs in a thread of this engine, which must not wait for it."""
        return any(worker.is_current for worker in self._workers)

    def _release(self) -> None:
        self._finalizer()

    def _extra(self) -> dict[str, Any]:
        return {"staging_bytes": sum(worker.staging_bytes for worker in self._workers)}


def _row(file: AioFile) -> tuple[int, ...]:
    """Return a file's `FILE` record."""
    fds = file.descriptors
    return (
        fds.direct,
        fds.buffered,
        fds.any,
        fds.flags,
        file.memory_alignment,
        file.granule,
        file.exclusive,
    )


def _shut_down(ledger: Ledger, workers: list[Worker]) -> None:
    """Drain and stop, also when the engine is collected or the interpreter ends."""
    if ledger.forked:
        return
    if any(worker.is_current for worker in workers):
        # Collected in a worker, which can't wait for itself.
        threading.Thread(target=_shut_down, args=(ledger, workers)).start()
        return
    ledger.close()
    ledger.wait_idle()
    for worker in workers:
        worker.stop()
    workers.clear()
