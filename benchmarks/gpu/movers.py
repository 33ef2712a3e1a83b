"""Ways between GPU memory and a file: ours, kvikio's, and torch's copies with our host path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.check import Check
from tensorspill.engine.request import Request
from tensorspill.opening import open_engine

__all__ = ["Mover", "engine_mover", "kvikio_mover", "torch_mover"]


@dataclass(frozen=True, slots=True)
class Mover:
    """A way to write tensors to a file and to read them back; both return when it is done."""

    write: Callable[[], object]
    read: Callable[[], object]


def engine_mover(
    check: Check,
    stack: ExitStack,
    path: Path,
    tensors: Sequence[torch.Tensor],
    backend: str,
    **options: Any,
) -> Mover:
    """Return our engine's way: one batch of requests."""
    engine = stack.enter_context(open_engine(path.parent, check.device, backend, **options))
    file = engine.open(path.name, "r+")

    def requests(write: bool) -> list[Request]:
        offsets = _offsets(tensors)
        return [
            Request(tensor, file, offset, write=write)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]

    return Mover(
        lambda: engine.submit(requests(True)).result(),
        lambda: engine.submit(requests(False)).result(),
    )


def kvikio_mover(
    check: Check, stack: ExitStack, path: Path, tensors: Sequence[torch.Tensor], threads: int
) -> Mover:
    """Return kvikio's way in compatibility mode, with direct I/O wherever it has it."""
    import kvikio
    import kvikio.defaults

    wanted = {
        "compat_mode": kvikio.CompatMode.ON,
        "num_threads": threads,
        "auto_direct_io_read": True,
        "auto_direct_io_write": True,
    }
    for name, value in wanted.items():
        before = kvikio.defaults.get(name)
        kvikio.defaults.set(name, value)
        stack.callback(kvikio.defaults.set, name, before)
    file = stack.enter_context(kvikio.CuFile(str(path), "r+"))
    arrays = [tensor.numpy() if tensor.is_cpu else tensor for tensor in tensors]
    offsets = _offsets(tensors)

    def move(begin: Callable[..., Any]) -> None:
        check.synchronize()
        pairs = zip(arrays, offsets, strict=True)
        futures = [begin(array, file_offset=offset) for array, offset in pairs]
        for future, array in zip(futures, arrays, strict=True):
            if future.get() != array.nbytes:
                raise RuntimeError("kvikio moved fewer bytes than asked")

    return Mover(lambda: move(file.pwrite), lambda: move(file.pread))


def torch_mover(
    check: Check, stack: ExitStack, path: Path, tensors: Sequence[torch.Tensor]
) -> Mover:
    """Return the way of who has no engine for GPU memory: a copy in page-locked memory."""
    engine = stack.enter_context(open_engine(path.parent, "cpu", "aio"))
    file, offsets = engine.open(path.name, "r+"), _offsets(tensors)
    pinned = check.device.type == "cuda"
    total = sum(tensor.nbytes for tensor in tensors)
    slab = torch.empty(total, dtype=torch.uint8, pin_memory=pinned)
    hosts = [
        slab[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, at in zip(tensors, offsets, strict=True)
    ]

    def requests(write: bool) -> list[Request]:
        pairs = zip(hosts, offsets, strict=True)
        return [Request(host, file, offset, write=write) for host, offset in pairs]

    def write() -> None:
        for host, tensor in zip(hosts, tensors, strict=True):
            host.copy_(tensor, non_blocking=True)
        check.synchronize()
        engine.submit(requests(True)).result()

    def read() -> None:
        engine.submit(requests(False)).result()
        for host, tensor in zip(hosts, tensors, strict=True):
            tensor.copy_(host, non_blocking=True)
        check.synchronize()

    return Mover(write, read)


def _offsets(tensors: Sequence[torch.Tensor]) -> list[int]:
    offsets, end = [], 0
    for tensor in tensors:
        offsets.append(end)
        end += tensor.nbytes
    return offsets
