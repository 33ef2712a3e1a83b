"""Training from the drive, on this machine: steps, memory, optimizer states, activations.

Usage: ``python -m benchmarks.training --folder /mnt/nvme``. As for the host path, ratios are of
pairs of one round, and what needs another package says so where that is missing.
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

from benchmarks.machine import describe
from benchmarks.report import Report, SuiteReport, markdown, print_report, write_json
from benchmarks.setting import FULL, QUICK, Setting, Sizes
from tensorspill.errors import SpillError
from tensorspill.profiling.clock import idle_cpu_rate
from tensorspill.profiling.place import working_folder

__all__ = ["SUITES", "main", "measure"]

Tick = Callable[[str], None]

#: Each a module of `benchmarks.suites` with a function ``run``.
SUITES = ("step", "memory", "optimizer", "activations", "deepspeed")

_NEEDED = 8 << 30
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
        progress.print(f"training: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        progress.print("training: interrupted; nothing is left behind")
        return 130
    if options.json:
        write_json(report, options.json)
    if options.markdown:
        sys.stdout.write(markdown(report) + "\n")
    else:
        console = Console()
        console = console if console.is_terminal else Console(width=_WIDTH)
        print_report(report, console, "Training")
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
    NoSpaceError
        There is not enough room on the drive.
    """
    machine, begun, chance = describe(folder), time.perf_counter(), random.Random(seed)
    suites: dict[str, SuiteReport] = {}
    threads = torch.get_num_threads()
    with working_folder(folder, _NEEDED if sizes == FULL else _NEEDED // 8) as place:
        idle = idle_cpu_rate()
        for name in only:
            with working_folder(place, 0) as own:
                tick(name)
                setting = Setting(own, rounds, sizes, chance, idle, partial(_tell, tick, name))
                suites[name] = importlib.import_module(f"benchmarks.suites.training_{name}").run(
                    setting
                )
                torch.set_num_threads(threads)
    settings = {"rounds": rounds, "seed": seed, "full size": sizes == FULL}
    return Report(machine, settings, suites, time.perf_counter() - begun)


def _tell(tick: Tick, suite: str, text: str) -> None:
    tick(f"{suite}, {text}")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="training", description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--folder", default="/var/tmp", help="where the drive is (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=9, help="of each comparison (default: 9)")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument(
        "--only", nargs="+", choices=SUITES, default=list(SUITES), metavar="SUITE",
        help=f"some of: {', '.join(SUITES)}",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything there as JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
