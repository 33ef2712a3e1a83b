"""How long an asynchronous save blocks, against copying the state into memory that is warm."""

from __future__ import annotations

from functools import partial

from benchmarks.checkpoint_ways import State, make_state, nbytes_of
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, at_least, at_most, figure
from benchmarks.setting import Setting
from tensorspill import checkpoint
from tensorspill.pool.sizes import parse_bytes
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.content import page_aligned, refresh
from tensorspill.profiling.rounds import Case, run_rounds

__all__ = ["run"]

TENSORS = 64


def run(setting: Setting) -> SuiteReport:
    """Measure blocks and copies of one state."""
    nbytes = 2 * setting.sizes.large
    state = make_state(nbytes, TENSORS)
    warm = {name: page_aligned(tensor.nbytes) for name, tensor in state.items()}
    budget = nbytes + parse_bytes("1MiB")
    with checkpoint.Staging(budget) as staging:
        root = setting.folder / "async"
        first = checkpoint.async_save(state, root, staging=staging, keep=1)
        first.result()
        checkpoint.async_save(state, root, staging=staging, keep=1).result()

        def block() -> Sample:
            for tensor in state.values():
                refresh(tensor)
            saving = checkpoint.async_save(state, root, staging=staging, keep=1)
            sample = Sample(saving.blocked, nbytes)
            saving.result()
            return sample

        cases: dict[str, Case] = {
            "async_save": block,
            "copy_": partial(_copy, state, warm, setting),
            "copy_ again": partial(_copy, state, warm, setting),
        }
        results = run_rounds(cases, setting.rounds, setting.chance, setting.tick)
        held = staging.nbytes
    compared = Compared("async", results, twins=("copy_", "copy_ again"))
    rows = [
        # As rates: 1 ÷ 1.1.
        compared.row("async_save", "copy_", at_least(0.909), name="blocks, as a rate of copying"),
        figure("async", "the first save blocks", first.blocked, "s"),
        figure("async", "staging memory ÷ budget", held / budget, "", at_most(1)),
    ]
    return SuiteReport(rows, [], {"async": results})


def _copy(state: State, warm: State, setting: Setting) -> Sample:
    for tensor in state.values():
        refresh(tensor)

    def copy() -> None:
        for name, tensor in state.items():
            warm[name].copy_(tensor)

    return timed(copy, nbytes_of(state), setting.idle)
