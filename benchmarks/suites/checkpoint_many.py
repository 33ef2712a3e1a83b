"""Ten thousand tensors of 64 KiB against the same bytes in ten tensors."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from benchmarks.checkpoint_ways import State, alone, fresh_folder, make_state, nbytes_of
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, at_least, at_most, figure
from benchmarks.setting import Setting
from tensorspill import checkpoint
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.content import refresh
from tensorspill.profiling.rounds import Case, run_rounds

__all__ = ["run"]

EACH = 64 << 10
MOST = 0.15


def run(setting: Setting) -> SuiteReport:
    """Measure the phases of saves of many small tensors."""
    count = setting.sizes.pages // 2
    many, few = make_state(count * EACH, count), make_state(count * EACH, 10)
    folder = setting.folder
    checkpoint.save(many, folder / "many")
    planned = checkpoint.save(many | few, folder / "first")
    cases: dict[str, Case] = {
        "many, writing": partial(_writing, many, folder / "many"),
        "many, writing again": partial(_writing, many, folder / "many"),
        "few, writing": partial(_writing, few, folder / "few"),
        "added": partial(_added, many, folder / "many"),
        "DCP, our planner": partial(_dcp, many, folder / "own", checkpoint.SavePlanner),
        "DCP, stock planner": partial(_dcp, many, folder / "stock", DefaultSavePlanner),
    }
    results = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
    twins = ("many, writing", "many, writing again")
    compared = Compared("many", results, twins=twins)
    added = results.median("added", _seconds)
    rows = [
        compared.row("many, writing", "few, writing", at_least(0.8), name=f"{count} of 64 KiB"),
        figure("many", "save with a cached plan adds", added, "s", at_most(MOST)),
        compared.row("DCP, our planner", "DCP, stock planner", at_least(1), name="dcp.save"),
        figure("many", "the first save", planned.seconds, "s"),
    ]
    notes = ["all of save but its writing: description, digest, plan, manifest, commit"]
    return SuiteReport(rows, notes, {"many": results})


def _seconds(sample: Sample) -> float | None:
    return sample.seconds


def _save(state: State, root: Path) -> checkpoint.SaveRecord:
    for tensor in state.values():
        refresh(tensor)
    return checkpoint.save(state, fresh_folder(root))


def _writing(state: State, root: Path) -> Sample:
    return Sample(_save(state, root).writing, nbytes_of(state))


def _added(state: State, root: Path) -> Sample:
    # As in training, the same state was saved right before.
    _save(state, root)
    record = _save(state, root)
    return Sample(record.seconds - record.writing, nbytes_of(state))


def _dcp(state: State, root: Path, planner: Callable[[], Any]) -> Sample:
    fresh_folder(root)
    with alone():
        begun = time.perf_counter()
        dcp.state_dict_saver.save(
            dict(state), storage_writer=checkpoint.Writer(root), planner=planner()
        )
        return Sample(time.perf_counter() - begun, nbytes_of(state))
