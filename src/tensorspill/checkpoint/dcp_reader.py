"""The storage reader for `torch.distributed.checkpoint` (DCP)."""

from __future__ import annotations

import io
import os
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from tensorspill.checkpoint.distributed.opened import opened_engines
from tensorspill.checkpoint.files import reading
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.manifest import Manifest
from tensorspill.checkpoint.loading import checkpoint_in
from tensorspill.checkpoint.objects import check_bytes
from tensorspill.checkpoint.saving import wait_for_saves
from tensorspill.errors import UnsupportedError

__all__ = ["Reader"]


class Reader(StorageReader):
    """Reads checkpoints of this library for DCP.

    ``dcp.load(state, storage_reader=Reader(folder))``, in any layout, with DCP's stock planner.
    Each rank reads the rows that it needs and checks them against their digests. Python objects
    pass ``weights_only=True`` before they are handed on, since DCP's stock planner unpickles
    whatever it is given.

    Parameters
    ----------
    folder : str or path, optional
        Of one checkpoint, or of all: then the latest is read. Else DCP's ``checkpoint_id`` names
        it.
    backend : str
        See `tensorspill.open_engine`.

    Attributes
    ----------
    record : ReadRecord or None
        Bytes needed and read by the last load, on this rank.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None, backend: str = "auto") -> None:
        super().__init__()
        self._folder = None if folder is None else os.path.abspath(os.fspath(folder))
        self._backend = backend
        self._path = ""
        self._manifest: Manifest | None = None
        self.record: reading.ReadRecord | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load, perhaps from another folder."""
        if checkpoint_id is not None:
            self._folder = os.path.abspath(os.fspath(checkpoint_id))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path."""
        return "://" not in os.fspath(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Return what the checkpoint holds, in DCP's form."""
        if self._folder is None:
            raise UnsupportedError(
                "The reader has no folder", remedy="Give one to Reader, or a checkpoint_id to load"
            )
        wait_for_saves()
        self._path = checkpoint_in(self._folder)
        self._manifest = reading.read_manifest(self._path)
        return _metadata(self._manifest, self._path)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Take nothing from it: the manifest has more."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what a plan asks for.

        Raises
        ------
        CorruptError
            Bytes differ from those written, or an object asks for more than plain data.
        BrokenError
            The operating system failed.
        """
        with (
            opened_engines(self._path, self._backend) as engines,
            reading.Reader(self._path, self._manifest, engine=engines) as reader,
        ):
            wants: list[reading.Want] = []
            ends = []
            for item in plan.items:
                name = item.storage_index.fqn
                if item.type is LoadItemType.BYTE_IO:
                    data = check_bytes(name, reader.read_object(name))
                    planner.load_bytes(item, io.BytesIO(data))
                    continue
                begin = item.storage_index.offset or (0,) * len(item.lengths)
                offsets = tuple(a + b for a, b in zip(begin, item.storage_offsets, strict=True))
                target = planner.resolve_tensor(item)
                values = target.detach()
                dtype = reader.manifest.tensors[name].dtype
                into = values
                if into.dtype is not dtype:
                    into = torch.empty(values.shape, dtype=dtype)
                wants.append(reading.Want(name, Box(offsets, tuple(item.lengths)), into))
                ends.append((item, target, values, into))
            self.record = reader.read(wants)
            for item, target, values, into in ends:
                if into is not values:
                    values.copy_(into)
                planner.commit_tensor(item, target)
        future: Future[None] = Future()
        future.set_result(None)
        return future


def _metadata(manifest: Manifest, path: str) -> Metadata:
    known: dict[str, Any] = {name: BytesStorageMetadata() for name in manifest.objects}
    places: dict[MetadataIndex, Any] = {}
    for name, tensor in manifest.tensors.items():
        chunks = [
            ChunkStorageMetadata(torch.Size(box.box.offsets), torch.Size(box.box.lengths))
            for box in tensor.boxes
        ]
        properties = TensorProperties(dtype=tensor.dtype)
        known[name] = TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        for number, box in enumerate(tensor.boxes):
            places[MetadataIndex(name, box.box.offsets, number)] = box.file, box.offset
    return Metadata(
        known,
        planner_data=dict(manifest.key_paths) or None,
        storage_data=places,
        storage_meta=StorageMeta(checkpoint_id=path),
    )
