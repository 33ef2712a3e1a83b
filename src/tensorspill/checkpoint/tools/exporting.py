"""Writing a checkpoint in the forms that others read, piece by piece, in bounded memory."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from tensorspill.checkpoint.files.chunks import Box, Chunk, Source
from tensorspill.checkpoint.files.durable import open_directory, write_text
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.manifest import KeyPath, Manifest
from tensorspill.checkpoint.files.reading import Reader
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.errors import BrokenError, UnsupportedError
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.sizes import parse_bytes

__all__ = ["Exported", "export_safetensors", "selected"]

STAGING = 32 << 20
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class Exported:
    """What an export wrote.

    Attributes
    ----------
    files : tuple of str
        Paths.
    tensors : int
    nbytes : int
        Bytes of the tensors.
    skipped : tuple of str
        Names of objects that the form has no place for.
    """

    files: tuple[str, ...]
    tensors: int
    nbytes: int
    skipped: tuple[str, ...]


class _Stored(Source):
    """A tensor of a checkpoint as the content of a new file."""

    def __init__(self, reader: Reader, name: str) -> None:
        record = reader.manifest.tensors[name]
        self.dtype, self.shape = record.dtype, record.shape
        self._reader = reader
        self._name = name

    def fill(self, start: int, out: torch.Tensor) -> None:
        """Read elements."""
        self._reader.read_elements(self._name, start, out)


def selected(manifest: Manifest, select: str | None) -> dict[str, KeyPath]:
    """Return the names below a key of the state dictionary, each with its path from there.

    Raises
    ------
    UnsupportedError
        There is nothing below that key.
    """
    names = [*manifest.tensors, *manifest.objects]
    paths: dict[str, KeyPath] = {name: manifest.key_paths.get(name, (name,)) for name in names}
    if select is None:
        return paths
    wanted = tuple(select.split("/"))
    depth = len(wanted)
    below = {
        name: path[depth:]
        for name, path in paths.items()
        if tuple(map(str, path[:depth])) == wanted and len(path) > depth
    }
    if not below:
        tops = sorted({str(path[0]) for path in paths.values()})
        raise UnsupportedError(f"Nothing is below {select!r}; there are {', '.join(tops[:20])}")
    return below


def export_safetensors(
    reader: Reader,
    folder: str | os.PathLike[str],
    *,
    select: str | None = None,
    shard_bytes: int | str = "5GB",
) -> Exported:
    """Write tensors as Hugging Face does: sharded safetensors files, and an index.

    Parameters
    ----------
    reader : Reader
    folder : str or path
        Made if missing; files of these names must not be there.
    select : str, optional
        Key of the state dictionary below which to take tensors, such as "model"; parts of a
        deeper key are divided by ``/``.
    shard_bytes : int or str
        Bytes of each file, unless a single tensor has more.

    Raises
    ------
    SpillError
        The checkpoint is damaged, or the files can't be written.
    """
    path = os.path.abspath(os.fspath(folder))
    manifest = reader.manifest
    names = selected(manifest, select)
    tensors = {".".join(map(str, names[name])): name for name in names if name in manifest.tensors}
    if len(tensors) < sum(name in manifest.tensors for name in names):
        raise UnsupportedError("Two tensors would have the same name in the export")
    shards = list(_shards(manifest, tensors, parse_bytes(shard_bytes)))
    files = [_shard_name(number, len(shards)) for number in range(1, len(shards) + 1)]
    if len(shards) > 1:
        files.append(INDEX)
    _make_place(path, files)
    try:
        _write(reader, path, dict(zip(files, shards, strict=False)))
    except BaseException:
        # Files that are not whole must not look as if they were.
        for file in files:
            if os.path.lexists(os.path.join(path, file)):
                os.unlink(os.path.join(path, file))
        raise
    total = sum(manifest.tensors[stored].nbytes for stored in tensors.values())
    return Exported(
        tuple(os.path.join(path, file) for file in files),
        len(tensors),
        total,
        tuple(name for name in names if name in manifest.objects),
    )


def _make_place(path: str, files: list[str]) -> None:
    try:
        os.makedirs(path, exist_ok=True)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't make the folder", path=path) from error
    for file in files:
        if os.path.lexists(os.path.join(path, file)):
            raise UnsupportedError(
                "There is such a file already", path=os.path.join(path, file),
                remedy="Export to another folder",
            )  # fmt: skip


def _write(reader: Reader, path: str, shards: Mapping[str, Mapping[str, str]]) -> None:
    """Write the files, and the index if there are several."""
    tensors = reader.manifest.tensors
    with Engines(path) as engines, BufferPool(STAGING, page_lock="no") as staging:
        for file, shard in shards.items():
            chunks = [
                Chunk(name, Box.whole(tensors[stored].shape), _Stored(reader, stored))
                for name, stored in shard.items()
            ]
            write_file(path, file, chunks, engine=engines, staging=staging)
    if len(shards) > 1:
        where = {name: file for file, shard in shards.items() for name in shard}
        total = sum(
            tensors[stored].nbytes for shard in shards.values() for stored in shard.values()
        )
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        fd = open_directory(path)
        try:
            write_text(fd, INDEX, (json.dumps(index, indent=2) + "\n").encode(), path)
        finally:
            os.close(fd)


def _shard_name(number: int, count: int) -> str:
    return "model.safetensors" if count == 1 else f"model-{number:05}-of-{count:05}.safetensors"


def _shards(manifest: Manifest, tensors: Mapping[str, str], most: int) -> Iterator[dict[str, str]]:
    """Divide tensors among files, in their order."""
    shard: dict[str, str] = {}
    held = 0
    for name, stored in tensors.items():
        nbytes = manifest.tensors[stored].nbytes
        if shard and held + nbytes > most:
            yield shard
            shard, held = {}, 0
        shard[name] = stored
        held += nbytes
    yield shard
