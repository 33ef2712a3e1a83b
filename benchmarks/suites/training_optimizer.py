"""An optimizer's step with its state on the drive, against the drive and against DeepSpeed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import torch
from torch import nn

from benchmarks.files import prewrite_spill
from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least
from benchmarks.setting import FULL, Setting
from tensorspill.optimizer import SpilledOptimizer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.files import written_file
from tensorspill.profiling.fio import FioJob, run_fio
from tensorspill.profiling.rounds import Case, Results, run_rounds
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

SUITE = "optimizer"
MIB = 1 << 20
#: State tensors per parameter, each of as many bytes.
STATES = 2
#: Of all state, what is in memory at a time.
BUDGET = 4
STEP = "step"
OURS = ("our engine, reads and writes at once", "our engine again")
FIO = "fio, reads and writes at once"
RATE_BOUND, DEEPSPEED_BOUND = 0.85, 1.3


def run(setting: Setting) -> SuiteReport:
    """Measure steps and the drive with the same mix, in turn; then DeepSpeed."""
    bench = Bench(setting)
    try:
        bench.warm_up()
        results = run_rounds(bench.cases(), setting.rounds, setting.chance, setting.tick)
    finally:
        bench.close()
    compared = Compared(SUITE, results, twins=OURS)
    what = f"AdamW, {bench.state_bytes / MIB:,.0f} MiB of state, a quarter of it in memory"
    rows = [
        compared.row(STEP, OURS[0], at_least(RATE_BOUND), name=what),
        compared.row(STEP, FIO, at_least(RATE_BOUND), name=what),
    ]
    more, note, found = _against_deepspeed(setting)
    return SuiteReport(
        [*rows, *more],
        [f"{bench.mix:.0%} of what a step moves is read", note],
        {"rate": results, **found},
    )


class Bench:
    """Parameters, their spilled optimizer, and the drive alone.

    Attributes
    ----------
    state_bytes : int
        Of all state.
    mix : float
        The part of a step's bytes that is read.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        nbytes = {True: 16 * MIB}.get(setting.sizes == FULL, setting.sizes.large // 32)
        count = max(24, setting.sizes.large // (STATES * nbytes))
        self.state_bytes = count * STATES * nbytes
        self.parameters = [nn.Parameter(torch.randn(nbytes // 4)) for _ in range(count)]
        gradient = torch.randn(nbytes // 4)
        for parameter in self.parameters:
            parameter.grad = gradient
        self.optimizer = SpilledOptimizer(
            torch.optim.AdamW,
            self.parameters,
            folder=setting.folder,
            budget=self.state_bytes // BUDGET,
            capacity=self.state_bytes * 3 // 2,
            fused=True,
        )
        prewrite_spill(self.optimizer.state_tensors.swapper.file)
        self.mix = 0.5
        self._each = nbytes
        self._alone: Alone | None = None

    def warm_up(self) -> None:
        """Make state, and learn what a step moves."""
        for _ in range(4):
            sample = self.step()
        self._moved = sample.nbytes
        self._alone = Alone(self.setting.folder, self._each, self._read, self._written)

    def step(self) -> Sample:
        """Time a step, until all of it is on the drive."""
        before, begun = self.optimizer.statistics(), time.perf_counter()
        self.optimizer.step()
        self.optimizer.state_tensors.store.collect(wait=True)
        seconds = time.perf_counter() - begun
        after = self.optimizer.statistics()
        self._read = after.bytes_in - before.bytes_in
        self._written = after.bytes_out - before.bytes_out
        nbytes = self._read + self._written
        self.mix = self._read / max(nbytes, 1)
        return Sample(seconds, nbytes)

    def cases(self) -> dict[str, Case]:
        """Return the step, and the same bytes moved by nothing but an engine, and by fio."""
        alone = self._alone
        if alone is None:
            raise RuntimeError("warm_up comes first")
        path = written_file(self.setting.folder / "mixed.dat", self._moved // MIB * MIB or MIB)
        share = f"--rwmixread={round(100 * self.mix)}"
        job = FioJob(path, "rw", path.stat().st_size, extra=(share,))
        return {
            STEP: self.step,
            OURS[0]: alone.move,
            OURS[1]: alone.move,
            FIO: partial(run_fio, job),
        }

    def close(self) -> None:
        """End it."""
        self.optimizer.close()
        if self._alone is not None:
            self._alone.close()


class Alone:
    """Reads and writes of tensors with nothing to compute."""

    def __init__(self, folder: Path, each: int, read: int, written: int) -> None:
        reads, writes = max(1, read // each), max(1, written // each)
        total = (reads + writes) * each
        self._pool = BufferPool(total + 4096)
        self._file = SpillFile(folder, capacity=2 * total)
        prewrite_spill(self._file)
        self._tensors = {
            f"{way} {i}": self._pool.allocate(each).tensor.random_()
            for way, count in (("read", reads), ("write", writes))
            for i in range(count)
        }
        self._file.put(self._tensors).result()

    def move(self) -> Sample:
        """Time all reads and writes, one tensor of each in turn, all under way at once."""
        begun = time.perf_counter()
        transfers = [
            (self._file.get if name.startswith("read") else self._file.put)({name: tensor})
            for name, tensor in sorted(
                self._tensors.items(), key=lambda item: int(item[0].split()[1])
            )
        ]
        nbytes = sum(transfer.result().nbytes for transfer in transfers)
        return Sample(time.perf_counter() - begun, nbytes)

    def close(self) -> None:
        """End it."""
        self._file.close()
        self._pool.close()


def _against_deepspeed(setting: Setting) -> tuple[list[Row], str, dict[str, Results]]:
    """Compare steps with those of DeepSpeed's pipelined swapping, in a process of its own."""
    setting.tick("DeepSpeed")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.suites.training_optimizer_deepspeed"),
            *(str(setting.folder), str(setting.rounds), str(setting.sizes.large)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )
    lines = done.stdout.splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else {}
    if "why" in found or not found:
        why = found.get("why") or (done.stderr.strip().splitlines() or ["no output"])[-1]
        return [], f"DeepSpeed's pipelined swapping: not measured ({why})", {}
    samples: dict[str, list[Sample | None]] = {
        who: [Sample(seconds, found["nbytes"]) for seconds in found[who]]
        for who in ("ours", "theirs")
    }
    results = Results(samples)
    row = Compared(SUITE, results).row(
        "ours",
        "theirs",
        at_least(DEEPSPEED_BOUND),
        name="the same states as DeepSpeed's pipelined swapping",
    )
    equal = "equal" if found["equal"] else "DIFFERENT"
    return (
        [row],
        f"parameters {equal} after as many steps by DeepSpeed",
        {"deepspeed": results},
    )
