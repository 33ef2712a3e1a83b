"""A large state from the drive, none of it in the page cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

from benchmarks.checkpoint_ways import (
    State,
    dcp_load,
    dcp_save,
    fast_file_load,
    files_in,
    make_state,
    nbytes_of,
    preallocated,
    torch_load,
    torch_save,
)
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, at_least, figure
from benchmarks.setting import Setting
from tensorspill import checkpoint
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import check_same, poison
from tensorspill.profiling.files import written_file
from tensorspill.profiling.fio import FioJob, run_fio
from tensorspill.profiling.page_cache import CacheWatch, drop_pages
from tensorspill.profiling.rounds import Case, run_rounds

__all__ = ["run"]

TENSORS = 64


def run(setting: Setting) -> SuiteReport:
    """Measure loads of one state."""
    nbytes, folder, watch = 2 * setting.sizes.large, setting.folder, CacheWatch()
    expected = make_state(nbytes, TENSORS)
    checkpoint.save(expected, folder / "ours")
    dcp_save(expected, folder / "dcp", 1)
    path = preallocated(folder / "torch.pt", nbytes + (1 << 20))
    torch_save(expected, path)
    plain = written_file(folder / "fio.dat", nbytes)
    target = {name: tensor.clone() for name, tensor in expected.items()}

    def into(load: Callable[[], object], files: Iterable[Path]) -> Sample:
        for tensor in target.values():
            poison(tensor)
        _drop(files, watch)
        sample = timed(load, nbytes_of(expected), setting.idle)
        _compare(target, expected)
        return sample

    def new(load: Callable[[Path], State]) -> Sample:
        _drop([path], watch)
        found: State = {}
        sample = timed(lambda: found.update(load(path)), nbytes_of(expected), setting.idle)
        _compare(found, expected)
        return sample

    saved, shards = files_in(folder / "ours"), files_in(folder / "dcp")
    ours = partial(into, lambda: checkpoint.load(target, folder / "ours"), saved)
    job = FioJob(plain, "read", nbytes)
    cases: dict[str, Case] = {
        "fio": partial(run_fio, job),
        "fio again": partial(run_fio, job),
        "ours": ours,
        "ours again": ours,
        "DCP": partial(into, lambda: dcp_load(target, folder / "dcp"), shards),
        "torch.load": partial(new, torch_load),
        "FastFile": partial(new, fast_file_load),
    }
    results = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
    compared = Compared("load", results, twins=("fio", "fio again"))
    record = checkpoint.load(target, folder / "ours")
    rows = [
        compared.row("ours", "fio", at_least(0.9)),
        compared.row("ours", "DCP", at_least(1.7)),
        compared.row("ours", "torch.load", at_least(1.15)),
        compared.row("FastFile", "torch.load"),
        compared.row("fio again", "fio", name="fio against itself"),
        compared.row("ours again", "ours", name="ours against itself"),
        figure("load", "bytes read ÷ needed", record.bytes_read / record.bytes_needed, ""),
    ]
    return SuiteReport(rows, watch.notes(), {"load": results})


def _drop(files: Iterable[Path], watch: CacheWatch) -> None:
    for path in files:
        drop_pages(path)
        watch.look(path)


def _compare(found: State, expected: State) -> None:
    for name, tensor in expected.items():
        check_same(found[name], tensor, name)
