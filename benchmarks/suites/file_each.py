"""A spill file against a file for each tensor, by the same engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.files import prewrite_spill
from benchmarks.own import Mover, open_measured, read, spill_mover, write
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row
from benchmarks.setting import Setting
from tensorspill.engine import Engine, Request, Transfer
from tensorspill.profiling.content import cut, ordinary_tensor, page_aligned, randomize
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

#: Files that are open at a time, and batches under way; few, so that any limit allows them.
TOGETHER = 32
AHEAD = 4


def run(setting: Setting) -> SuiteReport:
    """Measure writes and reads of ordinary tensors."""
    count, each = setting.sizes.tensors, setting.sizes.tensor_bytes
    watch, results, rows = CacheWatch(), dict[str, Results](), list[Row]()
    tensors = {f"t{i}": ordinary_tensor(each) for i in range(count)}
    expected = page_aligned(count * each)
    randomize(expected)
    parts = cut(expected, each)
    with ExitStack() as stack:
        engine = stack.enter_context(open_measured(setting.folder))
        spill = stack.enter_context(
            SpillFile(setting.folder, capacity=2 * count * (each + 8192) + (1 << 20))
        )
        prewrite_spill(spill)
        for name in tensors:
            engine.open(name, "w", each).close()
        movers = {"spill file": spill_mover(spill, tensors), "a file each": _mover(engine, tensors)}
        for way in ("write", "read"):
            for tensor, part in zip(tensors.values(), parts, strict=True):
                tensor.copy_(part)
            for mover in movers.values():
                mover.write()
            cases: dict[str, Case] = {
                name: partial(write, mover, setting)
                if way == "write"
                else partial(read, mover, parts, setting, watch)
                for name, mover in movers.items()
            }
            results[way] = run_rounds(cases, setting.fewer_rounds, setting.chance, setting.tick)
            rows.append(
                Compared("file each", results[way]).row(
                    "spill file", "a file each", name=f"{way}, {count:,} x {each >> 10} KiB"
                )
            )
    return SuiteReport(rows, _summary(watch), results)


def _mover(engine: Engine, tensors: dict[str, torch.Tensor]) -> Mover:
    folder = engine.folder
    return Mover(
        list(tensors.values()),
        lambda: _move(engine, tensors, True),
        lambda: _move(engine, tensors, False),
        lambda: [(f"{folder}/{name}", 0) for name in tensors],
    )


def _move(engine: Engine, tensors: dict[str, torch.Tensor], write: bool) -> None:
    """Move a few files at a time, with the next ones opened while they are under way."""
    under_way: list[tuple[Transfer, ExitStack]] = []
    for group in _groups(list(tensors)):
        files = ExitStack()
        opened = [files.enter_context(engine.open(n, "r+" if write else "r")) for n in group]
        requests = [
            Request(tensors[name], file, write=write)
            for name, file in zip(group, opened, strict=True)
        ]
        under_way.append((engine.submit(requests), files))
        if len(under_way) > AHEAD:
            _finish(*under_way.pop(0))
    for transfer, files in under_way:
        _finish(transfer, files)


def _finish(transfer: Transfer, files: ExitStack) -> None:
    with files:
        transfer.result()


def _groups(names: list[str]) -> Iterator[list[str]]:
    for begin in range(0, len(names), TOGETHER):
        yield names[begin : begin + TOGETHER]


def _summary(watch: CacheWatch) -> list[str]:
    """Return the first few lines: there are thousands of files."""
    lines = watch.notes()
    return lines if len(lines) < 4 else [*lines[:3], f"and {len(lines) - 3} files more"]
