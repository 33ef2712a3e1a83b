"""Checkpoints on this machine: against fio, torch.save and torch.distributed.checkpoint.

Usage: ``python -m benchmarks.checkpoint --folder /mnt/nvme``. As for the host path, ratios are of
pairs of one round. fsync is part of every write, files are fresh and preallocated on both sides
unless a row says otherwise, and nothing that is read is in the page cache, which is looked at.
"""

from __future__ import annotations

import argparse
import importlib
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.machine import describe, memory_available
from benchmarks.report import Report, SuiteReport, markdown, print_report, write_json
from benchmarks.setting import FULL, QUICK, Setting, Sizes
from tensorspill.errors import CapacityError, SpillError
from tensorspill.profiling.clock import idle_cpu_rate
from tensorspill.profiling.place import working_folder

__all__ = ["SUITES", "main", "measure"]

Tick = Callable[[str], None]

#: Each a module of `benchmarks.suites` with a function ``run``.
SUITES = ("save", "load", "many", "async", "ranks")

_WIDTH = 160


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    options = _parse(arguments)
    progress = Console(stderr=True)
    sizes = QUICK if options.quick else FULL
    try:
        with progress.status("starting") as status:
            report = measure(
                Path(options.folder),
                options.only,
                options.rounds,
                sizes,
                options.seed,
                lambda text: status.update(text),
            )
    except SpillError as error:
        progress.print(f"checkpoint: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        progress.print("checkpoint: interrupted; nothing is left behind")
        return 130
    if options.json:
        write_json(report, options.json)
    if options.markdown:
        sys.stdout.write(markdown(report) + "\n")
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        print_report(report, console, "Checkpoints")
    return 0


def measure(
    folder: Path,
    only: Sequence[str],
    rounds: int,
    sizes: Sizes,
    seed: int,
    tick: Tick = lambda _: None,
) -> Report:
    """Run suites in a folder of their own inside `folder`, one after the other.

    Raises
    ------
    NoSpaceError, CapacityError
        There is not enough room on the drive, or too little memory.
    """
    machine, begun, chance = describe(folder), time.perf_counter(), random.Random(seed)
    _check_memory(sizes)
    suites: dict[str, SuiteReport] = {}
    seconds: dict[str, float] = {}
    with working_folder(folder, 10 * sizes.large + (64 << 20)) as place:
        idle = idle_cpu_rate()
        for name in only:
            with working_folder(place, 0) as own:
                tick(name)
                started = time.perf_counter()
                setting = Setting(own, rounds, sizes, chance, idle, partial(_tell, tick, name))
                module = importlib.import_module(f"benchmarks.suites.checkpoint_{name}")
                suites[name] = module.run(setting)
                seconds[name] = round(time.perf_counter() - started, 1)
    settings = {
        "rounds": rounds,
        "seed": seed,
        "full size": sizes == FULL,
        "threads": torch.get_num_threads(),
        "seconds": seconds,
    }
    return Report(machine, settings, suites, time.perf_counter() - begun)


def _tell(tick: Tick, suite: str, text: str) -> None:
    tick(f"{suite}, {text}")


def _check_memory(sizes: Sizes) -> None:
    """Refuse to measure what would be swapped out."""
    needed, available = 7 * sizes.large, memory_available()
    if needed > available:
        raise CapacityError(
            "Too little memory to measure with",
            asked=needed,
            free=available,
            largest=available,
            remedy="Use --quick",
        )


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="checkpoint", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--folder", default="/var/tmp", help="where the drive is (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each comparison (default: 9)")
    parser.add_argument("--quick", action="store_true", help="small sizes, three rounds")
    parser.add_argument(
        "--only", nargs="+", choices=SUITES, default=list(SUITES), metavar="SUITE",
        help=f"some of: {', '.join(SUITES)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases")
    options = parser.parse_args(arguments)
    if options.rounds is None:
        options.rounds = 3 if options.quick else 9
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
