"""DeepSpeed's handle on our engines against its own operator: the same calls, files and tensors."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.own import Mover, read, write
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least
from benchmarks.setting import Setting
from tensorspill.profiling.content import cut, ordinary_tensor, page_aligned, randomize
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["run"]

SUITE = "DeepSpeed"
#: Bytes of a large tensor.
LARGE = 16 << 20
#: As DeepSpeed's configuration has them by default, except for the depth: its handle's default of
#: 128 gives it no more.
HANDLE: dict[str, Any] = {
    "block_size": 1 << 20,
    "queue_depth": 32,
    "single_submit": False,
    "overlap_events": True,
}

Handle = Any


def run(setting: Setting) -> SuiteReport:
    """Measure large tensors, pinned and not, and many small ones."""
    theirs, why = _own_handle()
    if theirs is None:
        return SuiteReport([], [f"DeepSpeed's operator: not measured ({why})"], {})
    from tensorspill.deepspeed import AioHandle

    handles = {"our engines": AioHandle(**HANDLE), "its own operator": theirs(**HANDLE)}
    sizes, watch = setting.sizes, CacheWatch()
    subjects = (
        ("large, pinned", LARGE, max(1, sizes.large // LARGE), True, 1.0),
        ("large, unpinned", LARGE, max(1, sizes.large // LARGE), False, 1.5),
        (f"{sizes.tensors:,} x {sizes.tensor_bytes >> 10} KiB, unpinned", sizes.tensor_bytes,
         sizes.tensors, False, 1.5),
    )  # fmt: skip
    rows: list[Row] = []
    results: dict[str, Results] = {}
    for name, each, count, pinned, bound in subjects:
        expected = page_aligned(count * each)
        randomize(expected)
        parts = cut(expected, each)
        movers = {
            who: _mover(handle, setting.folder / who.replace(" ", "-"), each, count, pinned)
            for who, handle in handles.items()
        }
        for way in ("write", "read"):
            found = _measure(way, movers, parts, setting, watch)
            results[f"{way}, {name}"] = found
            rows.append(
                Compared(SUITE, found).row(
                    "our engines", "its own operator", at_least(bound), name=f"{way}, {name}"
                )
            )
        for mover in movers.values():
            for path, _ in mover.places():
                Path(path).unlink()
    return SuiteReport(rows, _summary(watch), results)


def _measure(
    way: str,
    movers: dict[str, Mover],
    parts: list[torch.Tensor],
    setting: Setting,
    watch: CacheWatch,
) -> Results:
    for mover in movers.values():
        for tensor, part in zip(mover.tensors, parts, strict=True):
            tensor.copy_(part)
        mover.write()
    cases: dict[str, Case] = {
        who: partial(write, mover, setting)
        if way == "write"
        else partial(read, mover, parts, setting, watch)
        for who, mover in movers.items()
    }
    return run_rounds(cases, setting.rounds, setting.chance, setting.tick)


def _mover(handle: Handle, folder: Path, each: int, count: int, pinned: bool) -> Mover:
    folder.mkdir(exist_ok=True)
    example = torch.empty(0, dtype=torch.uint8)
    tensors = [
        handle.new_cpu_locked_tensor(each, example) if pinned else ordinary_tensor(each)
        for _ in range(count)
    ]
    paths = [str(folder / f"{i}.swp") for i in range(count)]

    def move(begin: Callable[..., int]) -> None:
        # Its own operator prints a warning on writes.
        with redirect_stdout(io.StringIO()):
            for tensor, path in zip(tensors, paths, strict=True):
                begin(tensor, path, 0)
            handle.wait()

    return Mover(
        tensors,
        lambda: move(handle.async_pwrite),
        lambda: move(handle.async_pread),
        lambda: [(path, 0) for path in paths],
    )


def _own_handle() -> tuple[type | None, str]:
    """Return the class of DeepSpeed's own handle, built if need be, or why there is none."""
    try:
        builders = importlib.import_module("deepspeed.ops.op_builder")
    except ImportError as error:
        return None, str(error)
    try:
        return builders.AsyncIOBuilder().load(verbose=False).aio_handle, ""
    except Exception as error:  # a compiler's, a linker's, or its own
        return None, f"{type(error).__name__}: {error}"


def _summary(watch: CacheWatch) -> list[str]:
    """Return the first few lines: there are thousands of files."""
    lines = watch.notes()
    return lines if len(lines) < 4 else [*lines[:3], f"and {len(lines) - 3} files more"]
