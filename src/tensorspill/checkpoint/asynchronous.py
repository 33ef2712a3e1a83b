"""Saving in the background: `async_save`."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from typing import Any, Literal

import torch

from tensorspill.checkpoint.distributed.attempt import Attempt, Settings
from tensorspill.checkpoint.distributed.group import ranks_of
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.files.chunks import Chunk, ObjectChunk
from tensorspill.checkpoint.saving import SaveRecord, dumped, file_name, saver_of
from tensorspill.checkpoint.staging import Snapshot, Staging, shared_staging
from tensorspill.errors import BusyError

__all__ = ["AsyncSave", "async_save"]


class AsyncSave(Future[SaveRecord]):
    """The future of a save in the background.

    An error that nobody has seen by `result` or `exception` is raised by the next save of the
    group, on all its ranks.

    Attributes
    ----------
    staged, remainder : int
        Bytes that were copied, and bytes that had to be written before `async_save` returned, as
        there was no room for copies of them.
    blocked : float
        Seconds that `async_save` took.
    """

    def __init__(self) -> None:
        super().__init__()
        self.staged = self.remainder = 0
        self.blocked = 0.0
        self._seen = False
        self.set_running_or_notify_cancel()

    def result(self, timeout: float | None = None) -> SaveRecord:
        """Wait for the end, at most `timeout` seconds, and return the record.

        Raises
        ------
        SpillError
            What `tensorspill.checkpoint.save` would have raised.
        TimeoutError
            It has not ended yet; it goes on.
        """
        try:
            return super().result(timeout)
        finally:
            self._seen = self._seen or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as `result` does and return the error, or None."""
        try:
            return super().exception(timeout)
        finally:
            self._seen = self._seen or self.done()

    def wait(self) -> None:
        """Wait for the end, however it ends."""
        super().exception()

    def settle(self, refuse: bool) -> None:
        """Wait for the end, and raise what nobody has seen; for the next save.

        Raises
        ------
        BusyError
            It has not ended, and `refuse` says not to wait.
        """
        if refuse and not self.done():
            raise BusyError(
                "The last asynchronous save is still writing",
                remedy="Wait for its result(), or save with busy='wait'",
            )
        seen = self._seen
        error = self.exception()
        if error is not None and not seen:
            raise error


def async_save(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    keep: int | None = None,
    process_group: Any = None,
    replicated: Iterable[str] = (),
    limits: Limits | None = None,
    compare: bool = False,
    timeout: float = 300.0,
    backend: str = "auto",
    staging: Staging | int | str | None = None,
    busy: Literal["wait", "refuse"] = "wait",
) -> AsyncSave:
    """Copy what this rank has to write of a state, and save it in the background.

    Returns once everything may be changed again. While the copies fit into the staging memory the
    drive isn't waited for; what does not fit is written before this returns, and
    `AsyncSave.remainder` says how much that was. The first call takes longer, since the staging
    memory has to be provided.

    Parameters
    ----------
    state, folder, step, keep, process_group, replicated, limits, compare, timeout, backend
        See `tensorspill.checkpoint.save`, which this shares plans and conditions with.
    staging : Staging, int or str, optional
        The memory for copies, or the budget in bytes of that which is shared by all saves of this
        process: half of the memory that is available when it is first needed if not given.
    busy : {"wait", "refuse"}
        What to do while an earlier asynchronous save of the group is still writing, at whichever
        rank.

    Raises
    ------
    BusyError
        An earlier save is still writing, and `busy` says not to wait; on all ranks.
    SpillError
        What an earlier asynchronous save failed with, if nobody has asked for it; or why this one
        could not begin. Nothing of this one was committed.
    """
    begun = time.perf_counter()
    if not isinstance(staging, Staging):
        staging = shared_staging(staging)
    settings = Settings(
        root=os.path.abspath(os.fspath(folder)),
        step=step,
        keep=keep,
        limits=limits or Limits(),
        compare=compare,
        timeout=timeout,
        backend=backend,
    )
    saver = saver_of(ranks_of(process_group, timeout))
    attempt = saver.begin(state, settings, replicated, refuse=busy == "refuse")
    future = AsyncSave()
    snapshot, copied, objects = _stage(attempt, staging, future)
    future.blocked = time.perf_counter() - begun
    saver.running = future
    thread = threading.Thread(
        target=_finish,
        args=(attempt, snapshot, copied, objects, future, begun),
        name="tensorspill-save",
    )
    with attempt.together():
        thread.start()
    return future


def _stage(
    attempt: Attempt, staging: Staging, future: AsyncSave
) -> tuple[Snapshot, list[Chunk], list[ObjectChunk]]:
    """Copy what there is room for, write the rest, and return what is left to do."""
    objects = dumped(attempt)
    chunks = attempt.chunks()
    with attempt.together():
        # Sources are read from the drive as they are written; they can't wait.
        plain = [chunk for chunk in chunks if isinstance(chunk.tensor, torch.Tensor)]
        sources = [chunk for chunk in chunks if not isinstance(chunk.tensor, torch.Tensor)]
        tensors = [chunk.tensor for chunk in plain if isinstance(chunk.tensor, torch.Tensor)]
        snapshot = staging.snapshot(tensors)
    try:
        pairs = list(zip(plain, snapshot.copies, strict=True))
        copied = [Chunk(c.name, c.box, copy, c.partial) for c, copy in pairs if copy is not None]
        rest = [chunk for chunk, copy in pairs if copy is None] + sources
        future.staged, future.remainder = snapshot.nbytes, sum(chunk.nbytes for chunk in rest)
        attempt.write(rest, (), file_name(attempt.rank, 1))
    except BaseException:
        snapshot.release()
        raise
    return snapshot, copied, objects


def _finish(
    attempt: Attempt,
    snapshot: Snapshot,
    chunks: list[Chunk],
    objects: list[ObjectChunk],
    future: AsyncSave,
    begun: float,
) -> None:
    """Write the copies and commit; in a thread."""
    try:
        try:
            attempt.write(chunks, objects, file_name(attempt.rank))
        finally:
            chunks.clear()
            snapshot.release()
        record = SaveRecord.of(attempt.finish(), attempt, begun)
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(record)
