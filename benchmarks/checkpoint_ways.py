"""The ways to write and read a state that are compared: ours, torch's, and fio's for the drive."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from tensorspill import checkpoint
from tensorspill.profiling.content import ordinary_tensor, randomize

__all__ = [
    "State",
    "alone",
    "dcp_load",
    "dcp_save",
    "fast_file_load",
    "fast_file_save",
    "files_in",
    "fresh_folder",
    "make_state",
    "nbytes_of",
    "preallocated",
    "torch_load",
    "torch_save",
]

State = dict[str, torch.Tensor]


def make_state(nbytes: int, count: int) -> State:
    """Return so many tensors of random content, in memory as torch allocates it."""
    state = {f"layer{i}.weight": ordinary_tensor(nbytes // count) for i in range(count)}
    for tensor in state.values():
        randomize(tensor)
    return state


def nbytes_of(state: State) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.nbytes for tensor in state.values())


def fresh_folder(path: Path) -> Path:
    """Return a folder that is empty; what was there is gone from the drive as well."""
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    _sync(path.parent)
    return path


def preallocated(path: Path, nbytes: int) -> Path:
    """Make a file whose blocks are allocated and were never written."""
    path.unlink(missing_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        os.fsync(fd)
    finally:
        os.close(fd)
    return path


def torch_save(state: State, path: Path) -> None:
    """Save by torch.save into a file that is there, down to the drive."""
    with path.open("r+b") as file:
        torch.save(state, file)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())


def torch_load(path: Path) -> State:
    """Load by torch.load."""
    found: State = torch.load(path)
    return found


def fast_file_save(state: State, path: Path) -> None:
    """Save by torch.save into a `FastFile`, which is durable when it is closed."""
    with checkpoint.FastFile(path, "wb") as file:
        torch.save(state, file)


def fast_file_load(path: Path) -> State:
    """Load by torch.load from a `FastFile`."""
    with checkpoint.FastFile(path, "rb") as file:
        found: State = torch.load(file)
    return found


def dcp_save(state: State, folder: Path, threads: int) -> None:
    """Save by torch.distributed.checkpoint's own writer, which calls fsync."""
    with alone():
        writer = FileSystemWriter(folder, thread_count=threads, sync_files=True)
        dcp.state_dict_saver.save(dict(state), storage_writer=writer)


def dcp_load(state: State, folder: Path) -> None:
    """Load by torch.distributed.checkpoint's own reader."""
    with alone():
        dcp.state_dict_loader.load(dict(state), storage_reader=FileSystemReader(folder))


@contextmanager
def alone() -> Iterator[None]:
    """Let torch.distributed.checkpoint not complain that there is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        yield


def files_in(folder: Path) -> list[Path]:
    """Return all files of a folder and below."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
