"""The first write to blocks of a file, against writes to blocks that were written before."""

from __future__ import annotations

import torch

from benchmarks.own import file_mover, open_measured
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, figure
from benchmarks.setting import Setting
from tensorspill.engine import Engine, File
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import page_aligned, randomize, refresh
from tensorspill.profiling.files import prewrite
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["run"]

GIB = 1 << 30


def run(setting: Setting) -> SuiteReport:
    """Measure preallocated and growing files, and what writing them beforehand costs."""
    nbytes = setting.sizes.saved
    memory = page_aligned(nbytes)
    randomize(memory)
    with open_measured(setting.folder) as engine:
        cases: dict[str, Case] = {
            "preallocated": lambda: _fresh(engine, memory, nbytes, setting),
            "growing": lambda: _fresh(engine, memory, None, setting),
            "written before": lambda: _again(engine, memory, setting),
            "writing beforehand": lambda: _beforehand(engine, nbytes, setting),
        }
        results = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
    compared = Compared("first touch", results)
    return SuiteReport(
        [
            compared.row("preallocated", "written before", name="preallocated blocks"),
            compared.row("growing", "written before", name="a file that grows"),
            figure("first touch", "writing blocks beforehand", _cost(results), "s/GiB"),
        ],
        (),
        {"first touch": results},
    )


def _cost(results: Results) -> float | None:
    return results.median("writing beforehand", lambda s: s.seconds / s.nbytes * GIB)


def _write(engine: Engine, file: File, memory: torch.Tensor, setting: Setting) -> Sample:
    refresh(memory)
    mover = file_mover(engine, file, [memory], [0])
    return timed(mover.write, memory.nbytes, setting.idle)


def _fresh(engine: Engine, memory: torch.Tensor, size: int | None, setting: Setting) -> Sample:
    with engine.open("fresh.dat", "x", size) as file:
        # So that making room on the drive is not part of it.
        file.sync()
        sample = _write(engine, file, memory, setting)
    engine.remove("fresh.dat")
    return sample


def _again(engine: Engine, memory: torch.Tensor, setting: Setting) -> Sample:
    mode = "r+" if (setting.folder / "written.dat").exists() else "x"
    with engine.open("written.dat", mode, memory.nbytes) as file:
        if mode == "x":
            prewrite(file.path)
        return _write(engine, file, memory, setting)


def _beforehand(engine: Engine, nbytes: int, setting: Setting) -> Sample:
    with engine.open("beforehand.dat", "x", nbytes) as file:
        file.sync()
        sample = timed(lambda: prewrite(file.path), nbytes, setting.idle)
    engine.remove("beforehand.dat")
    return sample
