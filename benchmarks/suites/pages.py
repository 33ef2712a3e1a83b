"""Thousands of tensors of 4 KiB in one batch, against fio at 4 KiB and the same depth.

Neighbours in the file are packed into few large operations; scattered ones can't be, so that these
show what an operation costs.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.own import DEPTH, Mover, file_mover, open_measured, read, write
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least
from benchmarks.setting import Setting
from tensorspill.profiling.content import cut, page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.fio import FioJob, run_fio
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["run"]

PAGE = 4096

#: The scattered pages lie in a region as many times as large.
REGION = 4
LAYOUTS = {"neighbours": ("write", "read"), "scattered": ("randwrite", "randread")}


def run(setting: Setting) -> SuiteReport:
    """Measure both layouts, writes and reads."""
    count = setting.sizes.pages
    path = written_file(setting.folder / "pages.dat", REGION * count * PAGE)
    watch, results, rows = CacheWatch(), dict[str, Results](), list[Row]()
    memory, expected = page_aligned(count * PAGE), page_aligned(count * PAGE)
    randomize(expected)
    with ExitStack() as stack:
        engine = stack.enter_context(open_measured(setting.folder))
        file = engine.open(path.name, "r+")
        for layout, fio_ways in LAYOUTS.items():
            offsets = _offsets(layout, setting)
            tensors = cut(memory, PAGE)
            mover = file_mover(engine, file, tensors, offsets)
            prepared = file_mover(engine, file, tensors, offsets, prepared=True)
            for way, rw in zip(("write", "read"), fio_ways, strict=True):
                memory.copy_(expected)
                mover.write()
                cases = _cases(
                    way,
                    rw,
                    mover,
                    prepared,
                    expected,
                    setting,
                    watch,
                )
                name = f"{way}, {layout}"
                results[name] = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
                rows += _rows(name, count, results[name])
    return SuiteReport(rows, watch.notes(), results)


def _offsets(layout: str, setting: Setting) -> list[int]:
    count = setting.sizes.pages
    if layout == "neighbours":
        return [i * PAGE for i in range(count)]
    # Every other page at most, so that no two are neighbours.
    places = setting.chance.sample(range(REGION * count // 2), count)
    return [2 * place * PAGE for place in places]


def _cases(
    way: str,
    rw: str,
    mover: Mover,
    prepared: Mover,
    expected: torch.Tensor,
    setting: Setting,
    watch: CacheWatch,
) -> dict[str, Case]:
    nbytes = mover.nbytes
    region = nbytes if rw in ("write", "read") else REGION * nbytes
    path = setting.folder / "pages.dat"
    job = FioJob(path, rw, nbytes, PAGE, DEPTH, region, extra=("--gtod_reduce=1",))
    wanted = cut(expected, PAGE)

    def ours(which: Mover) -> Case:
        if way == "write":
            return partial(write, which, setting)
        return partial(read, which, wanted, setting, watch)

    return {
        "fio": partial(run_fio, job),
        "fio again": partial(run_fio, job),
        "ours": ours(mover),
        "ours, prepared": ours(prepared),
    }


def _rows(what: str, count: int, results: Results) -> list[Row]:
    compared = Compared("pages", results, twins=("fio", "fio again"))
    title = f"{what}, {count:,} x 4 KiB"
    return [
        compared.row("ours", "fio", at_least(1.2), name=title),
        compared.row("ours, prepared", "fio", name=f"{title}, prepared batch"),
        compared.row("fio again", "fio", name=f"{what}, fio against itself"),
    ]
