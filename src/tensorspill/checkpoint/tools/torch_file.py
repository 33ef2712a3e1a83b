"""Writing a checkpoint as one file of `torch.save`, piece by piece, in bounded memory."""

from __future__ import annotations

import io
import os
import pickle
import secrets
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tensorspill.checkpoint.files.durable import sync_folder
from tensorspill.checkpoint.files.manifest import KeyPath
from tensorspill.checkpoint.files.reading import Reader
from tensorspill.checkpoint.tools.exporting import Exported, selected
from tensorspill.engine.engine import Engine
from tensorspill.engine.file import File
from tensorspill.engine.request import Request
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import BrokenError
from tensorspill.opening import open_engine

__all__ = ["export_torch"]

#: Bytes in memory at a time, twice.
WINDOW = 32 << 20


def export_torch(
    reader: Reader, path: str | os.PathLike[str], *, select: str | None = None
) -> Exported:
    """Write the nested state dictionary as `torch.save` does.

    torch lays the file out, with room for the tensors, and these are written into it. Objects that
    do not load with ``weights_only=True`` are left out.

    Parameters
    ----------
    reader : Reader
    path : str or path
        Of the file; it appears when it is whole.
    select : str, optional
        See `export_safetensors`.

    Raises
    ------
    SpillError
        The checkpoint is damaged, or the file can't be written.
    """
    target = os.path.abspath(os.fspath(path))
    folder, base = os.path.split(target)
    names = selected(reader.manifest, select)
    stored = {path: name for name, path in names.items() if name in reader.manifest.tensors}
    objects, skipped = _objects(reader, names)
    temporary = f".{base[:200]}.{secrets.token_hex(4)}.saving"
    beside = os.path.join(folder, temporary)
    try:
        with open_engine(folder, "cpu", "aio") as engine:
            offsets = _lay_out(beside, reader, stored, objects)
            with engine.open(temporary, "r+") as file:
                for place, offset in offsets.items():
                    if place in stored:
                        _copy(reader, stored[place], engine, file, offset)
                    else:
                        _write(engine, file, offset, _at(objects, place))
                file.sync()
        os.replace(beside, target)
    except OSError as error:
        if isinstance(error, BrokenError):
            raise
        raise BrokenError.from_oserror(error, "Can't write the file", path=target) from error
    finally:
        if os.path.lexists(beside):
            os.unlink(beside)
    sync_folder(folder)
    total = sum(reader.manifest.tensors[name].nbytes for name in stored.values())
    return Exported((target,), len(stored), total, tuple(skipped))


def _objects(reader: Reader, names: Mapping[str, KeyPath]) -> tuple[dict[KeyPath, Any], list[str]]:
    """Return the objects that can be loaded safely, and the names of the others."""
    found: dict[KeyPath, Any] = {}
    skipped = []
    for name, path in names.items():
        if name in reader.manifest.objects:
            data = io.BytesIO(reader.read_object(name))
            try:
                found[path] = torch.load(data, weights_only=True)
            except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError):
                skipped.append(name)
    return found, skipped


def _lay_out(
    path: str, reader: Reader, stored: Mapping[KeyPath, str], objects: Mapping[KeyPath, Any]
) -> dict[KeyPath, int]:
    """Write a file without the tensors' bytes; return where those of each belong."""
    # Late: these take a second.
    from torch._subclasses.fake_tensor import FakeTensorMode

    leaves: dict[KeyPath, Any] = dict(objects)
    with FakeTensorMode():
        for place, name in stored.items():
            record = reader.manifest.tensors[name]
            leaves[place] = torch.empty(record.shape, dtype=record.dtype)
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save(_nested(leaves), path)
    with FakeTensorMode():
        # Only to learn the places: no bytes are read.
        laid_out = torch.load(path, weights_only=True)
    return {
        place: int(tensor.untyped_storage()._checkpoint_offset or 0)
        for place, tensor in _tensors(laid_out, ())
        if tensor.untyped_storage().nbytes()
    }


def _nested(leaves: Mapping[KeyPath, Any]) -> Any:
    """Build nested dictionaries and lists (where a key is a number) from paths."""
    root: dict[Any, Any] = {}
    for place, leaf in leaves.items():
        inner = root
        for key in place[:-1]:
            inner = inner.setdefault(key, {})
        inner[place[-1]] = leaf
    return _with_lists(root, leaves)


def _with_lists(node: Any, leaves: Mapping[KeyPath, Any], place: KeyPath = ()) -> Any:
    if place in leaves:
        return node
    below = {key: _with_lists(value, leaves, (*place, key)) for key, value in node.items()}
    if below and all(isinstance(key, int) for key in below):
        return [below.get(index) for index in range(max(below) + 1)]
    return below


def _tensors(node: Any, place: KeyPath) -> Iterator[tuple[KeyPath, torch.Tensor]]:
    if isinstance(node, torch.Tensor):
        yield place, node
    elif isinstance(node, dict):
        for key, value in node.items():
            yield from _tensors(value, (*place, key))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _tensors(value, (*place, index))


def _at(objects: Mapping[KeyPath, Any], place: KeyPath) -> torch.Tensor:
    """Return a tensor inside of an object."""
    for depth in range(len(place), -1, -1):
        if place[:depth] in objects:
            node = objects[place[:depth]]
            for key in place[depth:]:
                node = node[key]
            assert isinstance(node, torch.Tensor)
            return node
    raise KeyError(place)


def _copy(reader: Reader, name: str, engine: Engine, file: File, offset: int) -> None:
    """Move a tensor from the checkpoint to its place, reading ahead of the writes."""
    record = reader.manifest.tensors[name]
    itemsize, total = record.dtype.itemsize, torch.Size(record.shape).numel()
    step = max(WINDOW // itemsize, 1)
    buffers = [torch.empty(min(step, total), dtype=record.dtype) for _ in range(2)]
    live: Transfer | None = None
    try:
        for turn, start in enumerate(range(0, total, step)):
            part = buffers[turn % 2][: min(step, total - start)]
            reader.read_elements(name, start, part)
            if live is not None:
                live.result()
            place = offset + start * itemsize
            live = engine.submit([Request(part, file, place, write=True)])
    finally:
        if live is not None:
            live.result()


def _write(engine: Engine, file: File, offset: int, tensor: torch.Tensor) -> None:
    data = bytes(tensor.untyped_storage())
    engine.submit([Request(data, file, offset, write=True)]).result()
