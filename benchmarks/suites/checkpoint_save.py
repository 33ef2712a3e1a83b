"""A large state to the drive: ours, torch's ways, and what fio writes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from benchmarks.checkpoint_ways import (
    State,
    dcp_save,
    fast_file_save,
    fresh_folder,
    make_state,
    nbytes_of,
    preallocated,
    torch_save,
)
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, at_least
from benchmarks.setting import Setting
from tensorspill import checkpoint
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import check_same, poison, refresh
from tensorspill.profiling.fio import FioJob, run_fio
from tensorspill.profiling.rounds import Case, run_rounds

__all__ = ["run"]

TENSORS = 64
DCP = ("DCP, 1 thread", "DCP, 2 threads", "DCP, 4 threads")


def run(setting: Setting) -> SuiteReport:
    """Measure saves of one state."""
    nbytes = 2 * setting.sizes.large
    state = make_state(nbytes, TENSORS)
    folder, kept = setting.folder, setting.folder / "kept"
    checkpoint.save(state, kept, keep=1)  # compiles, or loads, what it needs

    def ours() -> Sample:
        root = fresh_folder(folder / "ours")
        return _fresh(state, setting, lambda: checkpoint.save(state, root))

    cases: dict[str, Case] = {
        "fio": partial(_fio, folder, nbytes),
        "fio again": partial(_fio, folder, nbytes),
        "ours": ours,
        "ours again": ours,
        "ours, recycled": partial(
            _fresh, state, setting, lambda: checkpoint.save(state, kept, keep=1)
        ),
        "torch.save": partial(_torch, state, setting),
        "FastFile": partial(_fast, state, setting),
    }
    for threads, name in zip((1, 2, 4), DCP, strict=True):
        cases[name] = partial(_dcp, state, setting, threads)
    results = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
    _check(state, folder / "ours")
    _check(state, kept, stale=True)
    compared = Compared("save", results, twins=("fio", "fio again"))
    best = results.fastest(DCP)
    rows = [
        compared.row("ours", "fio", at_least(0.9)),
        compared.row("ours", "torch.save", at_least(4)),
        compared.row("ours", best, at_least(3)),
        *(compared.row("ours", name) for name in DCP if name != best),
        compared.row("ours, recycled", "fio"),
        compared.row("ours, recycled", "ours"),
        compared.row("FastFile", "torch.save", at_least(1.5)),
        compared.row("fio again", "fio", name="fio against itself"),
        compared.row("ours again", "ours", name="ours against itself"),
    ]
    notes = [f"{nbytes} bytes in {TENSORS} tensors; writes of ours and fio's pass the page cache"]
    return SuiteReport(rows, notes, {"save": results})


def _fresh(state: State, setting: Setting, save: Callable[[], object]) -> Sample:
    for tensor in state.values():
        refresh(tensor)
    return timed(save, nbytes_of(state), setting.idle)


def _fio(folder: Path, nbytes: int) -> Sample | None:
    path = preallocated(folder / "fio.dat", nbytes)
    return run_fio(FioJob(path, "write", nbytes, extra=("--end_fsync=1",)))


def _torch(state: State, setting: Setting) -> Sample:
    path = preallocated(setting.folder / "torch.pt", nbytes_of(state) + (1 << 20))
    return _fresh(state, setting, lambda: torch_save(state, path))


def _fast(state: State, setting: Setting) -> Sample:
    path = setting.folder / "fast.pt"
    path.unlink(missing_ok=True)
    return _fresh(state, setting, lambda: fast_file_save(state, path))


def _dcp(state: State, setting: Setting, threads: int) -> Sample:
    folder = fresh_folder(setting.folder / "dcp")
    return _fresh(state, setting, lambda: dcp_save(state, folder, threads))


def _check(state: State, root: Path, stale: bool = False) -> None:
    """Load what was saved last, and compare it with what is in memory, unless that has changed."""
    loaded = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in loaded.values():
        poison(tensor)
    checkpoint.load(loaded, root)
    if not stale:
        checkpoint.save(state, root)
        checkpoint.load(loaded, root)
        for name, tensor in state.items():
            check_same(loaded[name], tensor, name)
