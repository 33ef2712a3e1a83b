"""The storage writer for `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from tensorspill.checkpoint import dcp_planner
from tensorspill.checkpoint.dcp_stager import Stager
from tensorspill.checkpoint.distributed.attempt import STAGING, next_step, step_name
from tensorspill.checkpoint.distributed.board import Board
from tensorspill.checkpoint.distributed.group import ranks_of
from tensorspill.checkpoint.distributed.opened import opened_engines
from tensorspill.checkpoint.distributed.wire import decode_written, encode_written, from_rank
from tensorspill.checkpoint.files.chunks import Box, Chunk, ObjectChunk, Source
from tensorspill.checkpoint.files.commit import Pending, begin
from tensorspill.checkpoint.files.manifest import assemble
from tensorspill.checkpoint.files.quiet import collection_paused
from tensorspill.checkpoint.files.records import Written
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.checkpoint.saving import file_name
from tensorspill.checkpoint.staging import Staging
from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer_pool import BufferPool

__all__ = ["Writer"]


class Writer(StorageWriter):
    """Writes DCP's checkpoints as `tensorspill.checkpoint.save` does: the same files and commit.

    ``dcp.save(state, storage_writer=Writer(folder), planner=SavePlanner())``; with DCP's stock
    planner it works too, and tensors are not cut then. Each save makes a new checkpoint in
    `folder`; `Reader` reads the latest.

    All ranks wait for each other in `write_data`. If one is lost or fails there, all that are left
    raise the same error, which DCP puts into a `CheckpointException`, or meets an error of its own
    when it next talks to a peer that is dead. Nothing is committed then.

    With ``dcp.async_save`` (in a thread) it is the stager as well: states are copied into pooled
    memory, and the next save waits until the memory is free again. It can't be sent to another
    process, as ``AsyncCheckpointerType.PROCESS`` asks for.

    Parameters
    ----------
    folder : str or path, optional
        Of all checkpoints; else DCP's ``checkpoint_id`` names it.
    step, keep
        See `tensorspill.checkpoint.save`.
    process_group : torch.distributed.ProcessGroup, optional
        The group that is given to ``save`` as well.
    timeout : float
        Seconds without progress after which a rank fails the save.
    backend : str
        See `tensorspill.open_engine`.
    staging : Staging, int or str, optional
        Memory for ``dcp.async_save``, or the budget of that which all saves of the process share;
        see `tensorspill.checkpoint.async_save`. It has to hold all of this rank's tensors.

    Attributes
    ----------
    path : str
        Of the checkpoint that was committed last by this writer, at the coordinator; else empty.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        step: int | None = None,
        keep: int | None = None,
        process_group: Any = None,
        timeout: float = 300.0,
        backend: str = "auto",
        staging: Staging | int | str | None = None,
    ) -> None:
        super().__init__()
        self._folder = None if folder is None else os.path.abspath(os.fspath(folder))
        self._step, self._keep = step, keep
        self._process_group = process_group
        self._timeout, self._backend = timeout, backend
        self._pending: Pending | None = None
        self._saved_step: int | None = None
        self._stager = Stager(staging, process_group, timeout)
        self.path = ""

    # -- what DCP calls for a save ---------------------------------------------------------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save, perhaps to another folder."""
        if checkpoint_id is not None:
            self._folder = os.path.abspath(os.fspath(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Return where it writes."""
        return StorageMeta(checkpoint_id=self._root)

    def set_up_storage_writer(self, *_: Any, **__: Any) -> None:
        """Forget what an earlier save left."""
        if self._pending is not None:
            self._pending.abandon()
            self._pending = None
        if self._folder is None:
            raise _no_folder()

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Open the pending checkpoint, and tell each rank where it is."""
        step = next_step(self._root) if self._step is None else self._step
        self._pending = begin(self._root, step_name(step), replace=True)
        self._saved_step = step
        places = [(self._pending.folder, rank, len(plans)) for rank in range(len(plans))]
        return [
            SavePlan(plan.items, place, plan.planner_data, plan.usable)
            for plan, place in zip(plans, places, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, and wait until all ranks have written theirs.

        Raises
        ------
        SpillError
            What went wrong, at whichever rank.
        """
        folder, rank, size = plan.storage_data
        ranks = ranks_of(self._process_group, self._timeout) if size > 1 else None
        if ranks is not None and ranks.size != size:
            raise UnsupportedError(
                f"DCP saves with {size} ranks, and the writer was made for {ranks.size}",
                remedy="Give the same process_group to save and to Writer",
            )
        board = None if ranks is None else ranks.board(self._timeout)
        try:
            written = self._write(folder, rank, plan.items, planner, board)
            if board is not None:
                self._wait(board)
        except Exception as error:
            if self._pending is not None:
                self._pending.abandon()
            if board is None:
                raise
            found = board.fail(from_rank(error, rank))
            raise found from (error if found is not error else None)
        finally:
            if board is not None:
                board.close()
            self._stager.release()
        digest = getattr(planner, "plan_digest", "")
        data = [] if written is None else [encode_written(written)]
        results = [WriteResult(MetadataIndex(f"rank {rank}"), 0, (data, digest))]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; called at the coordinator.

        Raises
        ------
        BrokenError
            The operating system failed; nothing was committed, unless `latest` says so.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise UnsupportedError("The save was not begun by prepare_global_plan")
        with pending, collection_paused():
            said = [result.storage_data for every in results for result in every]
            shapes = {
                name: (tensor.properties.dtype, tuple(tensor.size))
                for name, tensor in metadata.state_dict_metadata.items()
                if isinstance(tensor, TensorStorageMetadata)
            }
            paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
            manifest = assemble(
                [decode_written(data) for every, _ in said for data in every],
                shapes,
                step=self._saved_step,
                plan_digest=said[0][1] if said else "",
                key_paths={name: tuple(path) for name, path in paths.items()},
            )
            self.path = pending.commit(manifest, self._keep)

    @property
    def _root(self) -> str:
        if self._folder is None:
            raise _no_folder()
        return self._folder

    def _write(
        self,
        folder: str,
        rank: int,
        items: list[WriteItem],
        planner: SavePlanner,
        board: Board | None,
    ) -> Written | None:
        with collection_paused():
            chunks = [chunk for item in items if (chunk := _chunk(item, planner)) is not None]
            objects = [
                ObjectChunk(item.index.fqn, _bytes(planner.resolve_data(item)))
                for item in items
                if item.type is WriteItemType.BYTE_IO
            ]
        if not (chunks or objects):
            return None
        if board is not None:
            board.working(True)
        try:
            with (
                opened_engines(self._root, self._backend) as engines,
                BufferPool(STAGING) as staging,
            ):
                return write_file(
                    *(folder, file_name(rank), chunks, objects),
                    engine=engines,
                    staging=staging,
                    progress=None if board is None else board.advance,
                )
        finally:
            if board is not None:
                board.working(False)

    def _wait(self, board: Board) -> None:
        """Return when all ranks have written; DCP gathers their results then."""
        board.say("done", b"")
        if board.rank == 0:
            board.hear_all("done")
            board.say("go", b"")
        board.hear("go", [0])

    # -- what DCP calls for an asynchronous save -------------------------------------------------

    _synchronize_after_execute = False

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `synchronize_staging` has to be called: copies are complete before."""
        return False

    def synchronize_staging(self) -> None:
        """Return at once."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state; waits until the copy of the last one is written.

        Raises what `Stager.stage` does.
        """
        return self._stager.stage(state_dict)

    def close(self) -> None:
        """Give up what belongs to a save that did not end; a second time does no harm."""
        self._stager.release()
        if self._pending is not None:
            self._pending.abandon()


class _Lazy(Source):
    """Content that a planner computes, once it is written."""

    def __init__(self, item: WriteItem, planner: SavePlanner, box: Box) -> None:
        data = item.tensor_data
        if data is None:
            raise UnsupportedError(f"{item.index.fqn!r} is planned as a tensor without a box")
        self.dtype = data.properties.dtype
        self.shape = box.lengths
        self._item, self._planner = item, planner
        self._values: torch.Tensor | None = None

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Put elements into `out`; the tensor is computed at the first and dropped at the last."""
        if self._values is None:
            tensor = self._planner.resolve_data(self._item)
            if not isinstance(tensor, torch.Tensor) or tensor.dtype is not self.dtype:
                raise UnsupportedError(
                    f"{self._item.index.fqn!r} is not the {self.dtype} that was planned"
                )
            self._values = tensor.detach().reshape(-1)
        out.copy_(self._values[start : start + out.numel()])
        if start + out.numel() == self._values.numel():
            self._values = None


def _chunk(item: WriteItem, planner: SavePlanner) -> Chunk | None:
    data = item.tensor_data
    if data is None:
        return None
    box = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if not box.numel and data.size.numel():
        return None
    partial = box.lengths != tuple(data.size)
    if type(planner) is DefaultSavePlanner or isinstance(planner, dcp_planner.SavePlanner):
        tensor = planner.resolve_data(item)
        if isinstance(tensor, torch.Tensor):
            return Chunk(item.index.fqn, box, tensor.detach(), partial)
    return Chunk(item.index.fqn, box, _Lazy(item, planner, box), partial)


def _no_folder() -> UnsupportedError:
    return UnsupportedError(
        "The writer has no folder", remedy="Give one to Writer, or a checkpoint_id to save"
    )


def _bytes(data: Any) -> bytes:
    found: bytes = data.getvalue()
    return found
