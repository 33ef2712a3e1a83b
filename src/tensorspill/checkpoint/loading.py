"""Loading a state: `load`."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch

from tensorspill.checkpoint.distributed.description import Held, describe
from tensorspill.checkpoint.distributed.nested import Path, flatten, put
from tensorspill.checkpoint.distributed.opened import opened_engines
from tensorspill.checkpoint.files.commit import latest
from tensorspill.checkpoint.files.dtypes import name_of
from tensorspill.checkpoint.files.manifest import MANIFEST, Manifest
from tensorspill.checkpoint.files.reading import Reader, Want
from tensorspill.checkpoint.objects import restore
from tensorspill.checkpoint.saving import asked, wait_for_saves
from tensorspill.checkpoint.stored import StoredStates
from tensorspill.errors import MissingFileError, MissingNameError, UnsupportedError

__all__ = ["LoadRecord", "checkpoint_in", "load"]


@dataclass(frozen=True)
class LoadRecord:
    """What a load did on this rank.

    Attributes
    ----------
    path : str
        Of the checkpoint.
    step : int or None
    bytes_needed, bytes_read : int
        Bytes of the tensors that were loaded, and bytes that were read for them.
    seconds : float
        Of reading.
    unused : tuple of str
        Names of the checkpoint that the state does not have.
    """

    path: str
    step: int | None
    bytes_needed: int
    bytes_read: int
    seconds: float
    unused: tuple[str, ...]


def load(
    state: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    strict: bool = True,
    backend: str = "auto",
) -> LoadRecord:
    """Load a checkpoint into a state, whatever the layout that it was saved from.

    Each rank reads the rows that it needs, by itself: nothing is exchanged, so ranks may load
    different parts, and an error at one is not known to others. Tensors are overwritten where they
    are; Python objects are replaced; objects at the top with `state_dict` and `load_state_dict` get
    their new state by that. An asynchronous save of this process that is under way is waited for.
    All bytes are checked against their digests first, piece by piece.

    Parameters
    ----------
    state : mapping
        As for `tensorspill.checkpoint.save`, with tensors of the checkpoint's shapes.
    folder : str or path
        Of one checkpoint, or of all: then the latest is loaded.
    strict : bool
        Every name of the state must be in the checkpoint; else those that are not are left alone.
    backend : str
        See `tensorspill.open_engine`.

    Raises
    ------
    MissingFileError
        There is no checkpoint.
    MissingNameError, UnsupportedError
        A name is missing, or is another shape or kind in the checkpoint; nothing was changed.
    CorruptError
        Bytes differ from those written, or an object asks for more than plain data (see
        `torch.serialization.add_safe_globals`). What was read before is changed.
    BrokenError
        The operating system failed.
    """
    wait_for_saves()
    path = checkpoint_in(folder)
    with opened_engines(path, backend) as engines, Reader(path, engine=engines) as reader:
        manifest = reader.manifest
        streams = {n: v for n, v in state.items() if hasattr(v, "streaming_state_dict")}
        kept = {name: value for name, value in state.items() if name not in streams}
        top = asked(kept)
        for name, value in kept.items():
            if isinstance(value, torch.optim.Optimizer):
                _grow(value, name, top[name], manifest)
        flat, paths = flatten(top)
        held = describe(flat, paths)
        names = _known(reader, held, strict)
        objects = {
            name: restore(name, reader.read_object(name))
            for name, part in zip(names, held.parts, strict=True)
            if name and not part.dtype
        }
        wants, casts = _wants(reader, held, names)
        record = reader.read(wants)
        for value, loaded in casts:
            value.copy_(loaded)
        _put_back(state, top, paths, objects)
        streamed = StoredStates(reader)
        for name, stream in streams.items():
            stream.load_state_dict(streamed.of(name))
    there = {*manifest.tensors, *manifest.objects}
    return LoadRecord(
        path,
        manifest.step,
        record.bytes_needed + streamed.bytes_needed,
        record.bytes_read + streamed.bytes_read,
        record.seconds + streamed.seconds,
        tuple(sorted(there.difference(names, streamed.used))),
    )


def checkpoint_in(folder: str | os.PathLike[str]) -> str:
    """Return the path of the checkpoint that a folder is, or of the latest one in it.

    Raises
    ------
    MissingFileError
        There is none.
    """
    if os.path.lexists(os.path.join(folder, MANIFEST)):
        return os.path.abspath(os.fspath(folder))
    found = latest(folder)
    if found is None:
        raise MissingFileError(
            "There is no checkpoint", path=folder, remedy="Look for its manifest.json"
        )
    return found


def _known(reader: Reader, held: Held, strict: bool) -> list[str]:
    """Return for each part its name, or an empty one if it is to be left alone."""
    manifest, names = reader.manifest, []
    for part in held.parts:
        known = manifest.tensors.get(part.name) if part.dtype else None
        if part.name not in (manifest.tensors if part.dtype else manifest.objects):
            other = manifest.objects if part.dtype else manifest.tensors
            if part.name in other:
                kinds = ("a Python object", "a tensor")
                raise UnsupportedError(
                    f"{part.name!r} is {kinds[not part.dtype]} in the checkpoint and "
                    f"{kinds[bool(part.dtype)]} in the state"
                )
            if strict:
                raise MissingNameError(
                    f"The checkpoint has no {part.name!r}",
                    path=reader.folder,
                    remedy="Use strict=False to leave what is missing as it is",
                )
            names.append("")
            continue
        if known is not None and known.shape != part.shape:
            raise UnsupportedError(
                f"Tensor {part.name!r} has shape {known.shape} in the checkpoint and {part.shape} "
                f"in the state"
            )
        names.append(part.name)
    return names


def _wants(
    reader: Reader, held: Held, names: list[str]
) -> tuple[list[Want], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return what to read, and copies to be made afterwards into tensors of other dtypes."""
    wants, casts = [], []
    for name, part, value in zip(names, held.parts, held.values, strict=True):
        if not (name and part.dtype and part.box.numel):
            continue
        target = value.detach()
        dtype = reader.manifest.tensors[name].dtype
        if name_of(dtype) != part.dtype:
            loaded = torch.empty(part.lengths, dtype=dtype)
            casts.append((target, loaded))
            target = loaded
        wants.append(Want(name, part.box, target))
    return wants, casts


def _grow(
    optimizer: torch.optim.Optimizer, name: str, state: dict[str, Any], manifest: Manifest
) -> None:
    """Make room in an optimizer's state for what it has not got before its first step."""
    from torch.distributed.tensor import DTensor

    missing = {
        known: path
        for known, path in manifest.key_paths.items()
        if len(path) > 2 and path[0] == name and path[1] == "state"
    }
    if state["state"] or not missing:
        return
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise UnsupportedError(
            f"The optimizer {name!r} of DTensors has no state to load into yet",
            remedy="Save and load torch.distributed.checkpoint.state_dict's "
            "get_optimizer_state_dict(model, optimizer)",
        )
    for known, path in missing.items():
        record = manifest.tensors.get(known)
        value = None if record is None else torch.empty(record.shape, dtype=record.dtype)
        put(state, path[1:], value)


def _put_back(
    state: Mapping[str, Any],
    top: dict[str, Any],
    paths: Mapping[str, Path],
    objects: Mapping[str, Any],
) -> None:
    """Put objects where they belong, and give stateful objects their new state."""
    stateful = [name for name, value in top.items() if state[name] is not value]
    for name, value in objects.items():
        path = paths[name]
        if len(path) > 1:
            put(top, path, value)
        elif isinstance(state, MutableMapping):
            state[path[0]] = value
        else:
            raise UnsupportedError(f"Object {name!r} can't be put into a {type(state).__name__}")
    for name in stateful:
        state[name].load_state_dict(top[name])
