"""A training step with everything on the drive, against compute alone and the bytes' own time."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import pairwise

import torch

from benchmarks.beside import Mover, stolen_seconds
from benchmarks.report import SuiteReport
from benchmarks.rows import Row, Verdict, at_least, at_most, figure, judge
from benchmarks.setting import FULL, QUICK, Setting
from benchmarks.training_model import Case, InMemory, Spilled, calibrated, step
from tensorspill import timeline
from tensorspill.demo.drive import measure
from tensorspill.profiling.clock import Sample, timed
from tensorspill.profiling.rounds import Results, cpu_seconds, noise_floor

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
    """Measure steps from the drive, steps in memory, and the drive, in turn.

    Once computing on all cores, and once with a core left to whatever serves the drive.
    """
    threads = torch.get_num_threads()
    reports = [_run(setting, cores) for cores in sorted({threads, max(1, threads - 1)})[::-1]]
    torch.set_num_threads(threads)
    return SuiteReport(
        [row for report in reports for row in report.rows],
        [note for report in reports for note in report.notes],
        {name: results for report in reports for name, results in report.results.items()},
    )


def _run(setting: Setting, cores: int) -> SuiteReport:
    on = "" if cores == torch.get_num_threads() else f" on {cores} of its cores"
    torch.set_num_threads(cores)
    setting.tick(f"calibrating{on}")
    width = {FULL.large: 1024, QUICK.large: 512}.get(setting.sizes.large, 64)
    block = Case(BLOCKS, width, 0).block_bytes
    budgets = (RESIDENT * block, STATES * block)
    probe = Spilled(Case(BLOCKS, width, 0), setting.folder, *budgets)
    rate = measure(probe.handle.swapper.file)
    probe.close()
    case = calibrated(BLOCKS, width, MOVED * BLOCKS * block / rate.of_mix(3, 2))
    after = _Way(SUITE + on, Spilled(case, setting.folder, *budgets))
    early = _Way(
        f"{SUITE}{on}, optimizer in backward",
        Spilled(case, setting.folder, *budgets, in_backward=True),
    )
    memory, other, mover = InMemory(case), InMemory(case), Mover(setting.folder)
    with timeline.recording() as recorded:
        for number in range(WARM_UP + setting.rounds):
            setting.tick(f"step {number + 1}{on}")
            batch = case.batch(number)
            alone = timed(partial(memory.step, batch), 0, setting.idle)
            for way in setting.chance.sample([after, early], 2):
                with recorded.step():
                    way.step(batch, memory.loss, setting.idle)
                if number >= WARM_UP:
                    way.note(recorded.steps[-1], alone)
            if number >= WARM_UP:
                moved = early.records[-1]
                early.note_beside(timed(partial(_beside, mover, moved, other, batch), moved.nbytes))
    mover.close()
    ways = [after, early]
    for way in ways:
        way.spilled.close()
    return SuiteReport(
        [row for way in ways for row in way.rows()],
        [_note(case, on, ways)],
        {way.name: Results(way.samples) for way in ways},
    )


def _beside(
    mover: Mover, record: timeline.StepRecord, model: InMemory, batch: torch.Tensor
) -> None:
    with mover.moving(record.bytes_read, record.bytes_written):
        model.step(batch)


class _Way:
    """Steps from the drive, one way.

    Parameters
    ----------
    name : str
        What rows call it.
    spilled : Spilled
    """

    def __init__(self, name: str, spilled: Spilled) -> None:
        self.name = name
        self.spilled = spilled
        cases = ("spilled", "bound", "compute", "beside")
        self.samples: dict[str, list[Sample | None]] = {case: [] for case in cases}
        self.records: list[timeline.StepRecord] = []
        self.of_drive: list[float] = []
        self.stolen: list[float] = []
        self._taken = Sample(0.0, 0)
        self._stolen = 0.0

    def step(self, batch: torch.Tensor, expected: float, idle: float) -> None:
        """Take a step, and check that the loss is that in memory."""
        losses: list[float] = []
        before = stolen_seconds()
        self._taken = timed(
            lambda: losses.append(step(self.spilled.model, self.spilled.optimizer, batch)), 0, idle
        )
        self._stolen = stolen_seconds() - before
        if losses != [expected]:
            raise AssertionError(f"{self.name}: the losses differ: {losses[0]} and {expected}")

    def note_beside(self, beside: Sample) -> None:
        """Count a step in memory, with the bytes of the last step moved meanwhile."""
        self.samples["beside"][-1] = beside

    def note(self, record: timeline.StepRecord, alone: Sample) -> None:
        """Count the step that was taken.

        Parameters
        ----------
        record : StepRecord
            Of it.
        alone : Sample
            A step in memory of the same round.
        """
        rate = measure(self.spilled.handle.swapper.file)
        drive = record.nbytes / rate.of_mix(record.bytes_read, record.bytes_written)
        self.samples["spilled"].append(Sample(record.seconds, record.nbytes, self._taken.cpu))
        self.samples["bound"].append(Sample(max(alone.seconds, drive), record.nbytes))
        self.samples["compute"].append(alone)
        self.samples["beside"].append(None)
        self.records.append(record)
        self.of_drive.append(drive / alone.seconds)
        self.stolen.append(self._stolen)

    def rows(self) -> list[Row]:
        """Return what was measured."""
        results = Results(self.samples)
        ratio = results.spread_of_ratios("spilled", "bound", _seconds)
        compute = [sample.seconds for sample in results.samples["compute"] if sample]
        noise = noise_floor([a / b for a, b in pairwise(compute)])
        row = Row(
            self.name,
            "parameters, gradients and states spilled",
            results.median("spilled", _seconds),
            "s",
            "max(compute alone, bytes / own rate)",
            results.median("bound", _seconds),
            ratio,
            at_most(1.15),
            noise,
            judge(ratio.median if ratio else None, at_most(1.15), noise),
        )
        beside = replace(
            row,
            reference="in memory, while the engine moves the same bytes",
            theirs=results.median("beside", _seconds),
            ratio=results.spread_of_ratios("spilled", "beside", _seconds),
            bound=None,
            verdict=Verdict.REPORTED,
        )
        hidden = statistics.median(record.hidden_pct for record in self.records)
        rate = statistics.median(record.gbps for record in self.records)
        used = [results.median(case, cpu_seconds) or 0.0 for case in ("spilled", "compute")]
        return [
            row,
            *([beside] if beside.theirs is not None else []),
            figure(self.name, "transfers hidden", hidden, "%", at_least(85)),
            figure(self.name, "rate in the step", rate, "GB/s"),
            figure(self.name, "CPU time beyond that in memory", used[0] - used[1], "s"),
            figure(self.name, "CPU time stolen by the host", statistics.median(self.stolen), "s"),
        ]


def _note(case: Case, on: str, ways: list[_Way]) -> str:
    times = " and ".join(f"{statistics.median(way.of_drive):.2f}" for way in ways)
    return (
        f"step{on}: {case.blocks} blocks of {case.block_bytes / 2**20:.1f} MiB, {case.rows} rows; "
        f"the bytes alone take {times} times as long as compute alone; losses equal to those in "
        "memory to the last bit"
    )


def _seconds(sample: Sample) -> float:
    return sample.seconds
