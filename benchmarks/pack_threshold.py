"""From which size on packing costs more than it saves, and how much staging is enough.

Usage: ``python -m benchmarks.pack_threshold --folder /mnt/nvme``. Tensors of one size, neighbours
in the file, are moved one by one and packed through staging. `PACK_BELOW` in
``host_fallback/segments.py`` and `RESIDUE_FROM` in ``src/tensorspill/spill_space.py`` rest on where
the two meet, `STAGING_BLOCKS` in ``host_fallback/context.py`` on the last table.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.packing import KINDS, SIZES, Line, crossing, measure_packing
from benchmarks.setting import FULL, Setting
from benchmarks.staging import measure_staging
from tensorspill.errors import SpillError
from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling.clock import Sample, idle_cpu_rate
from tensorspill.profiling.place import working_folder
from tensorspill.profiling.rounds import Results, noise_floor

__all__ = ["main"]

MIB = 1 << 20

#: Of tables that do not go to a terminal.
_WIDTH = 120


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    options = _parse(arguments)
    total = 8 * MIB if options.quick else 32 * MIB
    sizes = SIZES[:9:4] if options.quick else SIZES
    torch.set_num_threads(1)
    progress, chance = Console(stderr=True), random.Random(options.seed)
    machine = describe(options.folder)
    try:
        with (
            working_folder(options.folder, 16 * total) as folder,
            progress.status("starting") as status,
        ):
            setting = Setting(folder, options.rounds, FULL, chance, idle_cpu_rate(), status.update)
            lines = measure_packing(setting, sizes, total)
            staged = measure_staging(setting, 8 * total)
    except SpillError as error:
        progress.print(f"pack_threshold: {error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        progress.print("pack_threshold: interrupted; nothing is left behind")
        return 130
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    for text in machine.lines():
        console.print(escape(text), style="dim", highlight=False)
    _print(console, lines, staged)
    if options.json:
        record = {
            "machine": machine.record(),
            "packing": _records(lines),
            "staging": _rates(staged),
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _print(console: Console, lines: Sequence[Line], staged: dict[str, Results]) -> None:
    for kind, meaning in KINDS.items():
        console.print(
            _packing_table(f"One by one: {meaning}", [x for x in lines if x.kind == kind])
        )
        for way in ("write", "read"):
            at = crossing(lines, kind, way)
            where = "nowhere up to here" if at is None else f"from {format_bytes(at)} on"
            console.print(f"{way}: one by one is as fast {where}", highlight=False)
    console.print(_staging_table(staged))


def _packing_table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(
        *("way", "tensor", "one by one", "packed", "packed / one by one", "noise", "CPU s/GiB"),
        title=title,
    )
    for line in sorted(lines, key=lambda line: line.way):
        results = line.results
        noise = noise_floor(results.ratios("packed again", "packed")) or 0.0
        costs = (results.median(case, _cpu_a_gib) or 0.0 for case in ("single", "packed"))
        table.add_row(
            line.way,
            format_bytes(line.nbytes),
            *(f"{results.median(case) or 0.0:.3g} GB/s" for case in ("single", "packed")),
            str(results.spread_of_ratios("packed", "single")),
            f"±{noise:.0%}",
            " : ".join(f"{cost:.3f}" for cost in costs),
        )
    return table


def _staging_table(staged: dict[str, Results]) -> Table:
    names = next(iter(staged.values())).samples
    columns = (f"{name} blocks" if name.isdecimal() else name for name in names)
    table = Table("way", *columns, title="Staging, one large ordinary tensor, GB/s")
    for way, results in staged.items():
        table.add_row(way, *(str(results.spread(case)) for case in names))
    return table


def _cpu_a_gib(sample: Sample) -> float | None:
    return None if sample.cpu is None else sample.cpu / sample.nbytes * (1 << 30)


def _records(lines: Sequence[Line]) -> list[dict[str, object]]:
    return [
        {
            "kind": line.kind,
            "way": line.way,
            "nbytes": line.nbytes,
            "gbps": {case: line.results.values(case) for case in line.results.samples},
        }
        for line in lines
    ]


def _rates(staged: dict[str, Results]) -> dict[str, dict[str, list[float | None]]]:
    return {
        way: {case: results.values(case) for case in results.samples}
        for way, results in staged.items()
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pack_threshold", description=str(__doc__).split("\n")[0])
    parser.add_argument("--folder", default="/var/tmp", help="where the drive is (%(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of each comparison (%(default)s)")
    parser.add_argument("--quick", action="store_true", help="few small sizes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rates there as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the order of cases (%(default)s)")
    options = parser.parse_args(arguments)
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main())
