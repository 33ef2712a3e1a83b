"""A training step with everything on the drive, against compute alone and the bytes' own time."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise

import torch

from benchmarks.report import SuiteReport
from benchmarks.rows import Row, at_least, at_most, figure, judge
from benchmarks.setting import FULL, QUICK, Setting
from benchmarks.training_model import Case, Spilled, Stack, calibrated, step
from tensorspill import timeline
from tensorspill.demo.drive import DriveRate, measure
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.rounds import Results, noise_floor

__all__ = ["run"]

SUITE = "step"
BLOCKS = 16
#: Blocks in memory at a time; as many again would do for the optimizer's states.
RESIDENT, STATES = 6, 4
#: Bytes that a step moves for each byte of parameters, roughly.
MOVED = 9
#: Steps that are not counted: the order is learnt, states are made.
WARM_UP = 2


def run(setting: Setting) -> SuiteReport:
    """Measure steps from the drive, steps in memory, and the drive, in turn."""
    width = {FULL.large: 1024, QUICK.large: 512}.get(setting.sizes.large, 64)
    block = Case(BLOCKS, width, 0).block_bytes
    setting.tick("calibrating")
    probe = Spilled(Case(BLOCKS, width, 0), setting.folder, RESIDENT * block, STATES * block)
    rate = measure(probe.handle.swapper.file)
    probe.close()
    case = calibrated(BLOCKS, width, MOVED * BLOCKS * block / rate.of_mix(3, 2))
    spilled = Spilled(case, setting.folder, RESIDENT * block, STATES * block)
    torch.manual_seed(0)
    model = Stack(case.blocks, case.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    samples: dict[str, list[Sample | None]] = {"spilled": [], "bound": [], "compute": []}
    records: list[timeline.StepRecord] = []
    rates: list[DriveRate] = []
    with timeline.recording() as recorded:
        for number in range(WARM_UP + setting.rounds):
            setting.tick(f"step {number + 1}")
            batch = case.batch(number)
            begun = time.perf_counter()
            expected = step(model, optimizer, batch)
            compute = time.perf_counter() - begun
            with recorded.step():
                found = step(spilled.model, spilled.optimizer, batch)
            if found != expected:
                raise AssertionError(f"The losses differ: {found} and {expected}")
            record = recorded.steps[-1]
            rate = measure(spilled.handle.swapper.file)
            if number < WARM_UP:
                continue
            drive = record.nbytes / rate.of_mix(record.bytes_read, record.bytes_written)
            samples["spilled"].append(Sample(record.seconds, record.nbytes))
            samples["bound"].append(Sample(max(compute, drive), record.nbytes))
            samples["compute"].append(Sample(compute, 0))
            records.append(record)
            rates.append(rate)
    spilled.close()
    return _report(case, Results(samples), records, rates)


def _report(
    case: Case,
    results: Results,
    records: list[timeline.StepRecord],
    rates: list[DriveRate],
) -> SuiteReport:
    ratio = results.spread_of_ratios("spilled", "bound", _seconds)
    compute = [sample.seconds for sample in results.samples["compute"] if sample]
    noise = noise_floor([a / b for a, b in pairwise(compute)])
    of_drive = [
        (r.nbytes / rate.of_mix(r.bytes_read, r.bytes_written)) / seconds
        for r, rate, seconds in zip(records, rates, compute, strict=True)
    ]
    hidden = statistics.median(record.hidden_pct for record in records)
    return SuiteReport(
        [
            Row(
                SUITE,
                "parameters, gradients and states spilled",
                results.median("spilled", _seconds),
                "s",
                "max(compute alone, bytes / own rate)",
                results.median("bound", _seconds),
                ratio,
                at_most(1.15),
                noise,
                judge(ratio.median if ratio else None, at_most(1.15), noise),
            ),
            figure(SUITE, "transfers hidden", hidden, "%", at_least(85)),
            figure(SUITE, "rate in the step", _median_rate(records), "GB/s"),
        ],
        [
            f"step: {case.blocks} blocks of {case.block_bytes / 2**20:.1f} MiB, {case.rows} rows; "
            f"the bytes alone take {statistics.median(of_drive):.2f} times as long as compute "
            "alone; losses equal to those in memory to the last bit"
        ],
        {"step": results},
    )


def _seconds(sample: Sample) -> float:
    return sample.seconds


def _median_rate(records: list[timeline.StepRecord]) -> float:
    return statistics.median(record.gbps for record in records)
