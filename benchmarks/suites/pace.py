"""The pace of a counting Python thread during our transfers, and while fio moves as many bytes."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

from benchmarks.counting import CountingThread
from benchmarks.own import Mover, file_mover, open_measured
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least
from benchmarks.setting import Setting
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.content import page_aligned, randomize
from tensorspill.profiling.files import written_file
from tensorspill.profiling.fio import FioJob, run_fio
from tensorspill.profiling.rounds import Case, Results, run_rounds

__all__ = ["run"]

#: Seconds for which the thread counts without anything else going on.
_ALONE = 0.3


def run(setting: Setting) -> SuiteReport:
    """Measure writes and reads."""
    nbytes = setting.sizes.large
    path = written_file(setting.folder / "pace.dat", nbytes)
    results, rows = dict[str, Results](), list[Row]()
    memory = page_aligned(nbytes)
    randomize(memory)
    with open_measured(setting.folder) as engine:
        mover = file_mover(engine, engine.open(path.name, "r+"), [memory], [0])
        mover.write()
        for way in ("write", "read"):
            with_fio = partial(_with_fio, path, way, nbytes)
            cases: dict[str, Case] = {
                "alone": _alone,
                "with ours": partial(_with_ours, mover, way),
                "with fio": with_fio,
                "with fio again": with_fio,
            }
            results[way] = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
            rows += _rows(way, results[way])
    return SuiteReport(rows, (), results)


def _pace(sample: Sample) -> float | None:
    return sample.count / sample.seconds / 1e6


def _rows(way: str, results: Results) -> list[Row]:
    compared = Compared("pace", results, "M/s", _pace, ("with fio", "with fio again"))
    return [
        compared.row("with ours", "with fio", at_least(0.9), name=f"counting during a {way}"),
        compared.row("with ours", "alone", name=f"counting during a {way}"),
    ]


def _alone() -> Sample:
    with CountingThread() as thread:
        begun = time.time()
        time.sleep(_ALONE)
        return _sample(thread, begun, time.time(), 0)


def _with_ours(mover: Mover, way: str) -> Sample:
    with CountingThread() as thread:
        begun = time.time()
        if way == "write":
            mover.write()
        else:
            mover.read()
        return _sample(thread, begun, time.time(), mover.nbytes)


def _with_fio(path: Path, way: str, nbytes: int) -> Sample | None:
    marks = path.with_suffix(".begun"), path.with_suffix(".ended")
    with CountingThread() as thread:
        if run_fio(FioJob(path, way, nbytes, marks=marks)) is None:
            return None
        begun, ended = (mark.stat().st_mtime for mark in marks)
        return _sample(thread, begun, ended, nbytes)


def _sample(thread: CountingThread, begun: float, ended: float, nbytes: int) -> Sample:
    return Sample(ended - begun, nbytes, count=thread.counted(begun, ended))
