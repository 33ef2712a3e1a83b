"""Whether the figures of the profiling commands can be trusted, on this machine.

Usage: ``python -m benchmarks.profiling --folder /mnt/nvme``. Three parts:

- ``fio``: what `bench` reports for fio's pattern against fio, in pairs of the same round, and fio
  against itself.
- ``overhead``: CPU time of this process's threads that are none of the engine's, while 1 MiB blocks
  are moved and timed.
- ``tune``: the choice of `tune`, several times over, against the best of one full sweep over the
  same settings, both measured again in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.machine import describe
from tensorspill.errors import SpillError
from tensorspill.profiling.bench import Bench
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.measuring import Measuring, Round
from tensorspill.profiling.memory import Memory, open_memory
from tensorspill.profiling.points import DIRECTIONS, Point
from tensorspill.profiling.rounds import Case, noise_floor, run_rounds, spread
from tensorspill.profiling.site import Site
from tensorspill.profiling.tune import Candidate, Mix, candidates, tune

__all__ = ["PARTS", "main", "measure"]

MIB = 1 << 20

#: What has to be reached.
ENOUGH, MOST_OVERHEAD, MOST_SECONDS, SHARE_OF_RUNS = 0.95, 1.0, 60.0, 0.9


class Sizes:
    """How much is measured."""

    def __init__(self, quick: bool) -> None:
        self.file = (64 if quick else 1024) * MIB
        self.pairs = 3 if quick else 15
        self.tuned_file = (64 if quick else 256) * MIB
        self.tune_seconds = 4.0 if quick else 45.0
        self.runs = 1 if quick else 10
        self.again = 3 if quick else 9
        self.sweep_rounds = 1 if quick else 9
        self.settings = 8 if quick else None


def measure_fio(folder: Path, sizes: Sizes, say: Any) -> dict[str, Any]:
    """Compare `bench` with fio at fio's own pattern."""
    found = {}
    with Site(folder, sizes.file) as site:
        bench = Bench(site, sizes.pairs, lambda _d, _t, text: say(text))
        points = [
            Point(direction=way, total_bytes=sizes.file, memory=memory)
            for memory in ("small-pages", "aligned")
            for way in DIRECTIONS
        ]
        bench.run([], points)
        for each in bench.comparisons:
            found[each.label] = {
                "bench / fio": str(each.ratio or each.why),
                "fio / fio": str(each.fio_spread or ""),
                "noise": each.noise,
                "met": each.close,
            }
    return found


class Watched(Measuring):
    """A measuring that adds up the CPU time of threads that are none of the engine's."""

    others = 0.0

    def _move(self, dropped: bool) -> Round:
        before = _cpu_of_others()
        done = super()._move(dropped)
        self.others += _cpu_of_others() - before
        return done


def _cpu_of_others() -> float:
    """Return the CPU seconds of all threads of this process but the engine's."""
    engines = {t.native_id for t in threading.enumerate() if t.name.startswith("tensorspill-")}
    total = 0
    for name in os.listdir("/proc/self/task"):
        if int(name) not in engines:
            total += int(Path(f"/proc/self/task/{name}/schedstat").read_text().split()[0])
    return total / 1e9


def measure_overhead(folder: Path, sizes: Sizes, say: Any) -> dict[str, Any]:
    """Measure the tool's own CPU time at 1 MiB blocks, in per cent of one CPU."""
    found = {}
    with Site(folder, sizes.file) as site:
        for way in DIRECTIONS:
            with Watched(site, Point(direction=way, total_bytes=sizes.file)) as one:
                for number in range(sizes.pairs):
                    say(f"overhead, {way} {number + 1}")
                    one.round()
                seconds = sum(done.seconds for done in one.rounds)
                own = 100 * one.others / seconds
                whole = 100 * sum(done.cpu or 0.0 for done in one.rounds) / seconds
            found[way] = {
                "own, % of a CPU": round(own, 3),
                "with the engine, % of a CPU": round(whole, 1),
                "met": own < MOST_OVERHEAD,
            }
    return found


def measure_tune(folder: Path, sizes: Sizes, say: Any) -> dict[str, Any]:
    """Compare the choice of `tune`, several times over, with the best of one full sweep."""
    chance = random.Random()
    with Site(folder, sizes.tuned_file) as site:
        grid = candidates(site.nbytes, len(os.sched_getaffinity(0)))
        tried = grid if sizes.settings is None else chance.sample(grid, sizes.settings)
        best = _sweep(site, tried, sizes, chance, say)
    runs = []
    for number in range(sizes.runs):
        with Site(folder, sizes.tuned_file) as site:
            say(f"tune, run {number + 1}")
            begun = time.perf_counter()
            found = tune(site, Mix(), tried, sizes.tune_seconds)
            seconds = time.perf_counter() - begun
            runs.append(_again(site, found.choice, best, sizes, chance) | {"seconds": seconds})
    good = sum(run["met"] for run in runs)
    slowest = max(run["seconds"] for run in runs)
    met = good >= SHARE_OF_RUNS * len(runs) and slowest < MOST_SECONDS
    return {"all": {"good runs": f"{good} of {len(runs)}", "slowest, s": slowest, "met": met}} | {
        f"run {number + 1}": run for number, run in enumerate(runs)
    }


def _sweep(
    site: Site, tried: Sequence[Candidate], sizes: Sizes, chance: random.Random, say: Any
) -> Candidate:
    """Return the fastest, by its median rate over that of all in the same round."""
    ratios: dict[Candidate, list[float]] = {candidate: [] for candidate in tried}
    with open_memory("cpu", "aligned", site.nbytes) as memory:
        for number in range(sizes.sweep_rounds):
            say(f"sweep, round {number + 1} of {sizes.sweep_rounds}")
            order = chance.sample(tried, len(tried))
            rates = {candidate: _rate(site, candidate, memory) for candidate in order}
            middle = statistics.median(rates.values())
            for candidate, rate in rates.items():
                ratios[candidate].append(rate / middle)
    return max(ratios, key=lambda candidate: statistics.median(ratios[candidate]))


def _rate(site: Site, candidate: Candidate, memory: Memory) -> float:
    """Return the rate of the mix, in GB/s, of one round each way."""
    mix, gbps = Mix(), {}
    for way in mix.directions:
        with Measuring(site, candidate.point(mix, way, site.nbytes), memory) as one:
            gbps[way] = one.round().gbps
    return mix.rate(gbps)


def _again(
    site: Site, choice: Candidate, best: Candidate, sizes: Sizes, chance: random.Random
) -> dict[str, Any]:
    with open_memory("cpu", "aligned", site.nbytes) as memory:

        def case(candidate: Candidate) -> Case:
            return lambda: Sample(1.0, int(_rate(site, candidate, memory) * 1e9))

        cases = {"choice": case(choice), "best": case(best), "best again": case(best)}
        results = run_rounds(cases, sizes.again, chance)
    ratios = results.ratios("choice", "best")
    noise = noise_floor(results.ratios("best again", "best")) or 0.0
    middle = statistics.median(ratios)
    return {
        "choice": choice.options,
        "best of the sweep": best.options,
        "choice / best": str(spread(ratios)),
        "noise": round(noise, 3),
        "met": middle >= ENOUGH or abs(middle - 1) <= noise,
    }


PARTS = {"fio": measure_fio, "overhead": measure_overhead, "tune": measure_tune}


def measure(
    folder: Path, only: Sequence[str], quick: bool, say: Any, runs: int | None = None
) -> dict[str, Any]:
    """Run parts one after the other; `runs` of tune, if not as many as usual."""
    sizes = Sizes(quick)
    sizes.runs = runs or sizes.runs
    return {name: PARTS[name](folder, sizes, say) for name in only}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return 0 if all was reached that could be measured."""
    parser = argparse.ArgumentParser(prog="profiling", description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", type=Path, default=Path("/var/tmp"), help="on the drive")
    parser.add_argument("--quick", action="store_true", help="tries the code, not the machine")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--runs", type=int, metavar="N", help="of tune; ten if not given")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there")
    options = parser.parse_args(arguments)
    console, progress = Console(highlight=False), Console(stderr=True)
    machine = describe(options.folder)
    try:
        with progress.status("starting") as status:
            found = measure(
                options.folder, options.only, options.quick, status.update, options.runs
            )
    except SpillError as error:
        progress.print(f"profiling: {error}", style="red", markup=False)
        return 1
    for line in machine.lines():
        console.print(line, markup=False)
    for part, cases in found.items():
        for case, figures in cases.items():
            text = ", ".join(f"{name} {value}" for name, value in figures.items())
            console.print(f"{part}: {case}: {text}", markup=False)
    if options.json:
        record = {"machine": machine.record(), "parts": found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    verdicts = [figures["met"] for cases in found.values() for figures in cases.values()]
    return 1 if False in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
