"""Checkpoints with random content, and comparing tensors to the bit."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch

from tensorspill.checkpoint.files.chunks import Box, Chunk, ObjectChunk
from tensorspill.checkpoint.files.commit import Pending, begin
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.manifest import Manifest, assemble
from tensorspill.checkpoint.files.reading import Reader, Want
from tensorspill.checkpoint.files.records import Written
from tensorspill.checkpoint.files.writing import write_file
from tensorspill.pool import BufferPool

State = Mapping[str, torch.Tensor]

#: Every dtype that can be kept.
DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32,
    torch.uint64, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2, torch.complex32, torch.complex64,
    torch.complex128,
]  # fmt: skip

_random = np.random.default_rng()


def fresh(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of random bits."""
    count = int(np.prod(shape, dtype=np.int64))
    if dtype is torch.bool:
        return torch.from_numpy(_random.integers(0, 2, count, np.uint8)).bool().view(tuple(shape))
    data = _random.integers(0, 256, count * dtype.itemsize, np.uint8)
    flat = torch.from_numpy(data).view(dtype) if count else torch.empty(0, dtype=dtype)
    return flat.view(tuple(shape))


def poisoned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return memory that no test expects."""
    count = int(np.prod(shape, dtype=np.int64))
    flat = torch.full((count * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)
    return flat.view(tuple(shape))


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal to the bit."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    raw = [x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for x in (a, b)]
    return torch.equal(*(x.view(torch.uint8) for x in raw)) if a.numel() else True


def mixed_state() -> dict[str, torch.Tensor]:
    """Return tensors of all kinds, a few MiB."""
    return {
        "large": fresh((1500, 1000)),
        "blocks": fresh((512, 1024), torch.bfloat16),
        "odd": fresh((333, 1001), torch.float16),
        "transposed": fresh((700, 300)).t(),
        "every third": fresh((64, 90, 30), torch.float64)[:, ::3],
        "scalar": fresh((), torch.int64),
        "nothing": fresh((0, 7)),
        "one": fresh((1,), torch.uint8),
        "parameter": torch.nn.Parameter(torch.randn(40, 40)),
        **{f"small.{i}": fresh((i + 1, 3)) for i in range(40)},
    }


def split(shape: Sequence[int], parts: int) -> list[Box]:
    """Cut a shape into boxes of whole rows."""
    if not shape or shape[0] < parts:
        return [Box.whole(shape)]
    edges = [shape[0] * i // parts for i in range(parts + 1)]
    rest = tuple(shape[1:])
    return [Box((a, *(0,) * len(rest)), (b - a, *rest)) for a, b in itertools.pairwise(edges)]


def write(
    pending: Pending, state: State, objects: Mapping[str, bytes] | None = None, writers: int = 1,
    step: int | None = None,
) -> Manifest:  # fmt: skip
    """Write a state with some writers, and return the manifest."""
    files: list[list[Chunk]] = [[] for _ in range(writers)]
    for name, tensor in state.items():
        boxes = split(tensor.shape, writers)
        for number, box in enumerate(boxes):
            files[number].append(Chunk(name, box, box.of(tensor.detach()), len(boxes) > 1))
    written: list[Written] = []
    with Engines(pending.root) as engines, BufferPool("20MiB", poison=True) as staging:
        for number, chunks in enumerate(files):
            kept = [ObjectChunk(*item) for item in (objects or {}).items()] if not number else []
            name = f"rank{number}.safetensors"
            written.append(
                write_file(pending.folder, name, chunks, kept, engine=engines, staging=staging)
            )
        assert staging.statistics().buffers == 0
    shapes = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in state.items()}
    return assemble(written, shapes, step=step)


def save(
    root: Path | str, name: str, state: State, objects: Mapping[str, bytes] | None = None,
    writers: int = 1, keep: int | None = None, step: int | None = None, replace: bool = False,
) -> str:  # fmt: skip
    """Save and commit a checkpoint; return its path."""
    with begin(root, name, replace=replace) as pending:
        return pending.commit(write(pending, state, objects, writers, step), keep)


def load(folder: str | Path) -> dict[str, torch.Tensor]:
    """Load all tensors of a checkpoint."""
    with Reader(folder) as reader:
        out = {
            name: poisoned(tensor.shape, tensor.dtype)
            for name, tensor in reader.manifest.tensors.items()
        }
        reader.read(Want(name, Box.whole(t.shape), t) for name, t in out.items())
    return out


def holds(folder: str | Path, state: State) -> bool:
    """Whether a checkpoint is a state, to the bit."""
    found = load(folder)
    return found.keys() == state.keys() and all(same(found[name], state[name]) for name in state)
