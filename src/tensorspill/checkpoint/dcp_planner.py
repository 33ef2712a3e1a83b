"""The planner for `torch.distributed.checkpoint.save`: each byte once, by the right writers."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from tensorspill.checkpoint.distributed.describing import Describer, plan_together
from tensorspill.checkpoint.distributed.description import Held
from tensorspill.checkpoint.distributed.group import Ranks, combined, ranks_of
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.distributed.nested import flatten
from tensorspill.checkpoint.distributed.planning import Plan
from tensorspill.checkpoint.distributed.replication import patterns
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.quiet import collection_paused
from tensorspill.checkpoint.objects import dump
from tensorspill.errors import UnsupportedError

__all__ = ["SavePlanner"]


@dataclass(frozen=True)
class _Brought:
    """What a rank tells the coordinator, in place of its items."""

    rank: int
    digest: str
    cached: str


class SavePlanner(DefaultSavePlanner):
    """Plans as `tensorspill.checkpoint.save` does, for DCP's ``save(planner=...)``.

    Which tensors are cut among writers, and how DDP is recognised, is said there. It works with any
    storage writer, and what is saved is loaded by DCP's stock planner in any layout.

    Plans are kept by a digest of what all ranks hold, of the group and of the limits, so that later
    saves exchange only digests; DCP's own plan cache is not used. One object may plan one save
    after the other, and a new object uses the plans of earlier ones.

    Parameters
    ----------
    process_group : torch.distributed.ProcessGroup, optional
        The group that is given to ``save`` as well.
    replicated : iterable of str
        Patterns of names of tensors that are equal on all ranks that hold them.
    limits : Limits, optional
        Who may write, and how finely tensors are cut.
    timeout : float
        Seconds that ranks may take to come to an exchange of descriptions.
    """

    def __init__(
        self,
        *,
        process_group: Any = None,
        replicated: Iterable[str] = (),
        limits: Limits | None = None,
        timeout: float = 300.0,
    ) -> None:
        super().__init__()
        self._process_group = process_group
        self._vouched = patterns(replicated)
        self._limits = limits or Limits()
        self._timeout = timeout
        self._folder = "."
        self._digest = ""
        self._held = Held()
        self._boxes: dict[tuple[str, Any], tuple[Any, Box, Box]] = {}
        #: Digest of the plan that is being carried out.
        self.plan_digest = ""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the state; called by DCP."""
        if storage_meta is not None and storage_meta.checkpoint_id is not None:
            self._folder = str(storage_meta.checkpoint_id)
        self.state_dict, self.mappings = flatten(state_dict)
        self.is_coordinator = is_coordinator

    def create_local_plan(self) -> SavePlan:
        """Return a digest of what this rank holds; called by DCP."""
        ranks = ranks_of(self._process_group, self._timeout)
        self._ranks = ranks
        with collection_paused():
            self._held, self._digest = _describer_of(ranks).describe(
                *(self.state_dict, self.mappings, self._vouched, self._limits),
                ("dcp", _device(self._folder)),
            )
        brought = _Brought(ranks.ranks[ranks.rank], self._digest, ranks.plans.key(self._digest))
        self.plan = SavePlan([], planner_data=brought)
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Say whether an earlier plan is used; called by DCP at the coordinator.

        The metadata is filled in by `finish_plan`.
        """
        every = [plan.planner_data for plan in all_plans]
        if len(every) == 1 and self._ranks.size > 1:
            # DCP was told to do without the others.
            answer: tuple[str, str] = ("alone", every[0].digest)
        elif tuple(brought.rank for brought in every) != self._ranks.ranks:
            raise UnsupportedError(
                f"DCP saves with the ranks {[b.rank for b in every]}, and the planner was made for "
                f"{list(self._ranks.ranks)}",
                remedy="Give the same process_group to save and to SavePlanner",
            )
        else:
            key = combined([brought.digest for brought in every])
            cached = all(brought.cached == key for brought in every)
            answer = ("cached" if cached else "new", key)
        self.metadata = Metadata({})
        return [SavePlan([], planner_data=answer) for _ in all_plans], self.metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Return the items that this rank writes; called by DCP."""
        how, key = new_plan.planner_data
        ranks = self._ranks
        with collection_paused():
            if how == "cached":
                plan = ranks.plans.get(self._digest)
            else:
                if how == "alone":
                    ranks = Ranks(ranks.ranks[ranks.rank : ranks.rank + 1], 0, None, None, "")
                plan = plan_together(ranks, self._held, self._folder, self._limits, self._timeout)
                if how == "new":
                    ranks.plans.put(self._digest, key, plan)
            if self.is_coordinator:
                _fill(self.metadata, plan, range(ranks.size))
            self.plan = SavePlan(
                self._items(plan, ranks.rank),
                storage_data=new_plan.storage_data,
                planner_data=self.mappings,
            )
        self.plan_digest = plan.digest
        return self.plan

    def _items(self, plan: Plan, rank: int) -> list[WriteItem]:
        values = {
            (part.name, part.box): value
            for part, value in zip(self._held.parts, self._held.values, strict=True)
            if part.dtype
        }
        items = [
            WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in plan.objects_of(rank)
        ]
        self._boxes = {}
        for name, held, box in plan.writes_of(rank):
            dtype, shape = plan.tensors[name]
            value = values.get((name, held))
            if value is None:  # a part without elements
                value = torch.empty(box.lengths, dtype=dtype)
            index = MetadataIndex(name, box.offsets)
            self._boxes[name, index.offset] = value, held, box
            items.append(_item(index, dtype, shape, box))
        return items

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what an item stands for, tensors as views; called by the storage writer."""
        index = write_item.index
        if write_item.type is WriteItemType.BYTE_IO:
            return io.BytesIO(dump(index.fqn, self.state_dict[index.fqn]))
        value, held, box = self._boxes[index.fqn, index.offset]
        return box.relative_to(held).of(value.detach())


def _describer_of(ranks: Ranks) -> Describer:
    """Return what describes states for a group, whichever planner asks."""
    found: Describer = ranks.kept.setdefault("planner", Describer(ranks))
    return found


def _device(folder: str) -> int:
    """Return the number of the device that a folder will be on: each save has its own folder."""
    place = os.path.abspath(folder)
    while not os.path.isdir(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    return os.stat(place).st_dev


def _item(index: MetadataIndex, dtype: torch.dtype, shape: tuple[int, ...], box: Box) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
    data = TensorWriteData(chunk, TensorProperties(dtype=dtype), torch.Size(shape))
    return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def _fill(metadata: Metadata, plan: Plan, ranks: Iterable[int]) -> None:
    """Describe what all ranks write, in DCP's form."""
    known = metadata.state_dict_metadata
    for name, (dtype, shape) in plan.tensors.items():
        known[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), [])
    for name in plan.objects:
        known[name] = BytesStorageMetadata()
    for rank in ranks:
        for name, _, box in plan.writes_of(rank):
            tensor = known[name]
            if isinstance(tensor, TensorStorageMetadata):
                tensor.chunks.append(
                    ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.lengths))
                )
    metadata.planner_data = dict(plan.paths)
