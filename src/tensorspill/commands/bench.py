"""``tensorspill bench``: how fast a drive is by every path, against fio and the limits."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING, Any

from tensorspill.commands.point_arguments import add_grid, add_output, add_size, points_of

if TYPE_CHECKING:
    from tensorspill.profiling.bench import Bench
    from tensorspill.profiling.site import Site

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure a drive: engines, blocks, depths, threads, memory, against fio and the limits"

_SIZE, _QUICK_SIZE = 1 << 30, 256 << 20
#: Seconds that a round takes, about; and one that is compared with fio, in half a minute.
_ROUND, _QUICK_ROUND, _QUICK_COMPARED = 0.5, 0.1, 0.25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_size(parser)
    parser.add_argument("--quick", action="store_true", help="fewer points, in half a minute")
    add_grid(parser)
    add_output(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure and show; return 0."""
    from tensorspill.commands.measured_text import progress
    from tensorspill.profiling.bench import Bench
    from tensorspill.profiling.site import Site
    from tensorspill.profiling.sweep import ResultsFile, write_csv

    if arguments.png:
        from tensorspill.profiling.pictures.drawing import check_matplotlib

        check_matplotlib()
    size = arguments.size or (_QUICK_SIZE if arguments.quick else _SIZE)
    file = None if arguments.out is None else ResultsFile(arguments.out)
    try:
        with progress() as tick, Site(arguments.path, size, lambda text: tick(0, 1, text)) as site:
            bench = Bench(site, arguments.rounds, tick)
            if file is not None:
                bench.on_row = file.add
            _measure(bench, site, arguments)
    finally:
        if file is not None:
            file.close()
    if arguments.csv:
        write_csv(arguments.csv, bench.rows)
    if arguments.png:
        from tensorspill.profiling.pictures.together import draw_results
        from tensorspill.profiling.rows import Results

        results = Results(tuple(bench.rows), tuple(map(tuple, bench.round_gbps)))
        draw_results(results, arguments.png, ceilings=bench.ceilings)
    if arguments.json:
        sys.stdout.write(json.dumps(_as_json(bench, site)) + "\n")
    else:
        from tensorspill.commands.bench_text import show

        show(bench, site)
    return 0


def _measure(bench: Bench, site: Site, arguments: argparse.Namespace) -> None:
    from tensorspill.profiling.bench import round_bytes, standard_points

    points = points_of(arguments, site.nbytes)
    if points is not None:
        bench.run(points)
        return
    quick = arguments.quick
    nbytes = round_bytes(site, _QUICK_ROUND if quick else _ROUND)
    most = round_bytes(site, _QUICK_COMPARED, 64 << 20) if quick else site.nbytes
    compared, others = standard_points(nbytes, most, quick)
    bench.run(others, compared)
    bench.other_programs(compared[-1])


def _as_json(bench: Bench, site: Site) -> dict[str, Any]:
    from tensorspill.profiling.bench import ceilings_json

    return {
        "path": site.path,
        "storage": site.storage.to_json(),
        "rows": [row.to_json() for row in bench.rows],
        "round_gbps": bench.round_gbps,
        "ceilings": ceilings_json(bench.ceilings),
        "comparisons": [each.to_json() for each in bench.comparisons],
    }
