"""One large transfer, from every kind of memory, against fio; with its CPU seconds."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack
from functools import partial

import torch

from benchmarks.files import prewrite_spill
from benchmarks.own import Mover, file_mover, open_measured, read, spill_mover, write
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least, at_most
from benchmarks.setting import Setting
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import locked, ordinary_tensor, page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.fio import LEAN, FioJob, run_fio
from tensorspill.profiling.page_cache import CacheWatch
from tensorspill.profiling.rounds import Case, Results, cpu_seconds, run_rounds
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

MIB = 1 << 20
FIO = ("fio", "fio lean")
DIRECT = "page-aligned"
SMALL = f"{DIRECT}, small pages"

#: What a staged byte may cost beside its input/output, in copies.
COPIES = 1.3


def run(setting: Setting) -> SuiteReport:
    """Measure writes, then reads."""
    nbytes = setting.sizes.large
    path = written_file(setting.folder / "large.dat", nbytes)
    watch = CacheWatch()
    with ExitStack() as stack:
        engine = stack.enter_context(open_measured(setting.folder))
        file = engine.open(path.name, "r+")
        spill = stack.enter_context(SpillFile(setting.folder, capacity=3 * nbytes + 8 * MIB))
        prewrite_spill(spill)
        aligned, expected = page_aligned(nbytes), page_aligned(nbytes)
        randomize(expected)
        small = page_aligned(nbytes, huge_pages=False)
        # One piece of memory, seen from two addresses.
        loose = ordinary_tensor(nbytes + 64)
        ordinary, odd = loose[:nbytes], loose[13 : 13 + nbytes]
        movers = {
            DIRECT: file_mover(engine, file, [aligned], [0]),
            SMALL: file_mover(engine, file, [small], [0]),
            "64-byte aligned, engine file": file_mover(engine, file, [ordinary], [0]),
            "odd address, engine file": file_mover(engine, file, [odd], [0]),
            "64-byte aligned, spill file": spill_mover(spill, {"ordinary": ordinary}),
            "odd address, spill file": spill_mover(spill, {"odd": odd}),
        }
        for mover in movers.values():
            mover.tensors[0].copy_(expected)
            mover.write()
        writes = run_rounds(
            _cases("write", setting, movers, expected, watch),
            setting.rounds,
            setting.chance,
            setting.tick,
        )
        for mover in movers.values():
            mover.tensors[0].copy_(expected)
            mover.write()
        reads = run_rounds(
            _cases("read", setting, movers, expected, watch),
            setting.rounds,
            setting.chance,
            setting.tick,
        )
    results = {"write": writes, "read": reads}
    rows = [
        row for way, found in results.items() for row in (*_rates(way, found), *_cpu(way, found))
    ]
    return SuiteReport(rows, watch.notes(), results)


def _cases(
    way: str, setting: Setting, movers: dict[str, Mover], expected: torch.Tensor, watch: CacheWatch
) -> dict[str, Case]:
    """Return fio's cases, ours, and one that copies."""

    def move(mover: Mover) -> Sample:
        if way == "write":
            return write(mover, setting)
        return read(mover, [expected], setting, watch)

    def move_locked(mover: Mover) -> Sample | None:
        with locked(mover.tensors[0]) as allowed:
            return move(mover) if allowed else None

    job = FioJob(setting.folder / "large.dat", way, setting.sizes.large)
    lean = FioJob(setting.folder / "large.dat", way, setting.sizes.large, extra=LEAN)
    target = movers[DIRECT].tensors[0]
    cases: dict[str, Case] = {
        "fio": partial(run_fio, job),
        "fio again": partial(run_fio, job),
        "fio lean": partial(run_fio, lean),
        f"{DIRECT} again": partial(move, movers[DIRECT]),
        f"{DIRECT}, locked": partial(move_locked, movers[DIRECT]),
        "memcpy": partial(_memcpy, target, expected, setting.idle),
    }
    cases |= {name: partial(move, mover) for name, mover in movers.items()}
    return cases


def _memcpy(target: torch.Tensor, source: torch.Tensor, idle: float) -> Sample:
    nbytes = source.nbytes
    return timed(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes), nbytes, idle)


def _rates(way: str, results: Results) -> list[Row]:
    """Compare direct with the faster fio, and everything else with direct."""
    fastest = results.fastest(FIO)
    with_fio = Compared("large", results, twins=("fio", "fio again"))
    with_direct = Compared("large", results, twins=(DIRECT, f"{DIRECT} again"))
    slower = FIO[1 - FIO.index(fastest)]
    rows = [
        with_fio.row(DIRECT, fastest, at_least(0.95), name=f"{way}, {DIRECT}"),
        with_fio.row(DIRECT, slower, name=f"{way}, {DIRECT}"),
        with_fio.row(f"{DIRECT}, locked", fastest, at_least(0.95), name=f"{way}, {DIRECT}, locked"),
        with_fio.row(SMALL, fastest, at_least(0.95), name=f"{way}, {SMALL}"),
    ]
    for place in ("spill file", "engine file"):
        for kind, bound in (("64-byte aligned", 0.9), ("odd address", 0.8)):
            case = f"{kind}, {place}"
            # torch's memory is not in huge pages, which alone makes a difference to a drive.
            rows += [
                with_direct.row(case, reference, at_least(bound), name=f"{way}, {case}")
                for reference in (DIRECT, SMALL)
            ]
    rows.append(with_fio.row("fio again", "fio", name=f"{way}, fio against itself"))
    rows.append(with_direct.row(f"{DIRECT} again", DIRECT, name=f"{way}, ours against itself"))
    return rows


def _cpu(way: str, results: Results) -> list[Row]:
    """Compare CPU seconds: direct with fio's, staged with fio's and those of copying."""
    cheapest = results.cheapest(FIO)
    allowed = f"{cheapest} + {COPIES} memcpy"
    results.derive(allowed, _allowed, cheapest, "memcpy")
    compared = Compared("large", results, "CPU s", cpu_seconds, ("fio", "fio again"))
    staged = ("64-byte aligned, engine file", "odd address, engine file")
    return [
        compared.row(direct, case, at_most(1.0), name=f"{way}, CPU, {direct}")
        for case in FIO
        for direct in (DIRECT, SMALL)
    ] + [compared.row(case, allowed, at_most(1.0), name=f"{way}, CPU, {case}") for case in staged]


def _allowed(fio: Sample, copy: Sample) -> Sample:
    return Sample(fio.seconds, fio.nbytes, (fio.cpu or 0.0) + COPIES * (copy.cpu or 0.0))
