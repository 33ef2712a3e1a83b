"""A spill file against torch.save and torch.load, both down to the drive."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from benchmarks.files import prewrite_spill
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared
from benchmarks.setting import Setting
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import check_same, ordinary_tensor, poison, randomize, refresh
from tensorspill.profiling.page_cache import CacheWatch, drop_pages
from tensorspill.profiling.rounds import Case, Results, run_rounds
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

MIB = 1 << 20
EACH = 4 * MIB

Tensors = dict[str, torch.Tensor]


def run(setting: Setting) -> SuiteReport:
    """Measure saving with fsync, and loading what is not in the page cache."""
    count = max(1, setting.sizes.saved // EACH)
    each = min(EACH, setting.sizes.saved)
    tensors = {f"t{i}": ordinary_tensor(each) for i in range(count)}
    for tensor in tensors.values():
        randomize(tensor)
    path, watch = setting.folder / "saved.pt", CacheWatch()
    with SpillFile(setting.folder, capacity=2 * count * (each + 8192) + 8 * MIB) as spill:
        prewrite_spill(spill)
        _save(tensors, path)
        spill.put(tensors).result()
        results = _measure(setting, spill, tensors, path, watch)
    rows = [
        Compared("torch.save", results["save"]).row(
            "spill file", "torch.save", name="write with fsync"
        ),
        Compared("torch.save", results["load"]).row(
            "spill file", "torch.load", name="read, nothing cached"
        ),
    ]
    return SuiteReport(rows, watch.notes(), results)


def _measure(
    setting: Setting, spill: SpillFile, tensors: Tensors, path: Path, watch: CacheWatch
) -> dict[str, Results]:
    rounds, chance, tick = setting.fewer_rounds, setting.chance, setting.tick
    save: dict[str, Case] = {
        "spill file": partial(_fresh, tensors, setting, lambda: _put(spill, tensors)),
        "torch.save": partial(_fresh, tensors, setting, lambda: _save(tensors, path)),
    }
    saved = run_rounds(save, rounds, chance, tick)
    # Both have to hold the same before they are read.
    _save(tensors, path)
    spill.put(tensors).result()
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    load: dict[str, Case] = {
        "spill file": partial(_get, spill, tensors, expected, setting, watch),
        "torch.load": partial(_load, path, expected, setting, watch),
    }
    return {"save": saved, "load": run_rounds(load, rounds, chance, tick)}


def _nbytes(tensors: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _fresh(tensors: Tensors, setting: Setting, save: Callable[[], None]) -> Sample:
    for tensor in tensors.values():
        refresh(tensor)
    return timed(save, _nbytes(tensors), setting.idle)


def _put(spill: SpillFile, tensors: Tensors) -> None:
    spill.put(tensors).result()
    fd = os.open(spill.paths[0], os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _save(tensors: Tensors, path: Path) -> None:
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def _get(
    spill: SpillFile, tensors: Tensors, expected: Tensors, setting: Setting, watch: CacheWatch
) -> Sample:
    for tensor in tensors.values():
        poison(tensor)
    watch.look(spill.paths[0])
    sample = timed(lambda: spill.get(tensors).result(), _nbytes(tensors), setting.idle)
    _compare(tensors, expected)
    return sample


def _load(path: Path, expected: Tensors, setting: Setting, watch: CacheWatch) -> Sample:
    drop_pages(path)
    watch.look(path)
    loaded: Tensors = {}
    sample = timed(lambda: loaded.update(torch.load(path)), _nbytes(expected), setting.idle)
    _compare(loaded, expected)
    return sample


def _compare(found: Tensors, expected: Tensors) -> None:
    for name, tensor in expected.items():
        check_same(found[name], tensor, name)
