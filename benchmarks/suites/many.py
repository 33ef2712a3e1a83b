"""Thousands of middling tensors in one batch, against one transfer of as many bytes."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.files import prewrite_spill
from benchmarks.own import Mover, file_mover, open_measured, read, spill_mover, write
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least
from benchmarks.setting import Setting
from tensorspill.profiling.content import cut, ordinary_tensor, page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, run_rounds
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

MIB = 1 << 20


def run(setting: Setting) -> SuiteReport:
    """Measure batches and single transfers, through an engine's file and a spill file."""
    count, each = setting.sizes.tensors, setting.sizes.tensor_bytes
    nbytes = count * each
    path = written_file(setting.folder / "many.dat", nbytes)
    watch, results, rows = CacheWatch(), dict[str, Results](), list[Row]()
    expected = page_aligned(nbytes)
    randomize(expected)
    with ExitStack() as stack:
        engine = stack.enter_context(open_measured(setting.folder))
        file = engine.open(path.name, "r+")
        spill = stack.enter_context(
            SpillFile(setting.folder, capacity=3 * nbytes + (2 * count + 64) * 4096)
        )
        prewrite_spill(spill)
        aligned, single = page_aligned(nbytes), ordinary_tensor(nbytes)
        separate = {f"t{i}": ordinary_tensor(each) for i in range(count)}
        one = file_mover(engine, file, [aligned], [0])
        movers = {
            "one transfer": one,
            "one transfer again": one,
            "batch": file_mover(engine, file, cut(aligned, each), range(0, nbytes, each)),
            "spill file, one tensor": spill_mover(spill, {"one": single}),
            "spill file, batch": spill_mover(spill, separate),
        }
        for way in ("write", "read"):
            for mover in movers.values():
                _fill(mover, expected)
                mover.write()
            cases: dict[str, Case] = {
                name: partial(write, mover, setting)
                if way == "write"
                else partial(read, mover, _parts(expected, mover), setting, watch)
                for name, mover in movers.items()
            }
            results[way] = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
            rows += _rows(f"{way}, {count:,} x {each >> 10} KiB", results[way])
    return SuiteReport(rows, watch.notes(), results)


def _rows(what: str, results: Results) -> list[Row]:
    compared = Compared("many", results, twins=("one transfer", "one transfer again"))
    return [
        compared.row("batch", "one transfer", at_least(0.9), name=what),
        compared.row(
            "spill file, batch",
            "spill file, one tensor",
            at_least(0.9),
            name=f"{what}, spill file, 64-byte aligned",
        ),
    ]


def _parts(whole: torch.Tensor, mover: Mover) -> list[torch.Tensor]:
    """Divide memory into what each tensor of a mover should hold."""
    return cut(whole, mover.tensors[0].nbytes)


def _fill(mover: Mover, content: torch.Tensor) -> None:
    for tensor, part in zip(mover.tensors, _parts(content, mover), strict=True):
        tensor.copy_(part)
