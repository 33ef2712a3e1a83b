"""What it takes to submit a batch of requests that were constructed before."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.own import open_measured
from benchmarks.report import SuiteReport
from benchmarks.rows import Row, at_most, figure
from benchmarks.setting import Setting
from tensorspill.engine import Request, Transfer
from tensorspill.profiling.content import ordinary_tensor
from tensorspill.profiling.files import written_file

__all__ = ["run"]

PAGE = 4096
REPEATS = 60


def run(setting: Setting) -> SuiteReport:
    """Measure `Engine.submit` with requests, and with a prepared batch."""
    count = setting.sizes.submitted
    path = written_file(setting.folder / "submit.dat", count * PAGE)
    rows: list[Row] = []
    with open_measured(setting.folder) as engine:
        file = engine.open(path.name, "r+")
        tensors = [ordinary_tensor(PAGE) for _ in range(count)]
        requests = [Request(tensor, file, i * PAGE) for i, tensor in enumerate(tensors)]
        prepared = engine.prepare(requests)
        median, worst = _median(lambda: engine.submit(requests))
        rows.append(
            figure(
                "submit",
                f"{count:,} constructed requests",
                median,
                "ms",
                at_most(2.0),
                f"90 % below {worst:.2f} ms",
            )
        )
        median, worst = _median(lambda: engine.submit(prepared))
        rows.append(
            figure(
                "submit",
                f"{count:,} requests, prepared batch",
                median,
                "ms",
                note=f"90 % below {worst:.2f} ms",
            )
        )
    return SuiteReport(rows)


def _median(submit: Callable[[], Transfer]) -> tuple[float, float]:
    """Return median and 90th percentile in milliseconds of submitting; not of transferring."""
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        transfer = submit()
        seconds.append(time.perf_counter() - begun)
        transfer.result()
    return statistics.median(seconds) * 1e3, statistics.quantiles(seconds, n=10)[-1] * 1e3
