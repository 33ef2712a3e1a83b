"""``tensorspill sweep``: every point of a grid, into a file; an interrupted one goes on."""

from __future__ import annotations

import argparse
import json
import os
import sys

from tensorspill.commands.point_arguments import add_grid, add_png, add_size, points_of

__all__ = ["HELP", "add_arguments", "run"]

HELP = "measure every point of a grid, into JSON lines and CSV; goes on where it was interrupted"

_SIZE = 256 << 20
_BLOCKS = tuple((64 << 10) << power for power in range(9))
_DEPTHS = (1, 2, 4, 8, 16, 32, 64)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add_size(parser)
    add_grid(parser)
    add = parser.add_argument
    add("--out", default="sweep.jsonl", metavar="FILE", help="results, as JSON lines (sweep.jsonl)")
    add("--csv", metavar="FILE", help="the same as CSV (beside the results)")
    add_png(parser)
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Measure what the file lacks, and write the CSV; return 0."""
    from tensorspill.commands.measured_text import output, progress
    from tensorspill.profiling.bench import Bench
    from tensorspill.profiling.rows import read_results
    from tensorspill.profiling.site import Site
    from tensorspill.profiling.sweep import ResultsFile, write_csv

    if arguments.png:
        from tensorspill.profiling.pictures.drawing import check_matplotlib

        check_matplotlib()
    size = arguments.size or _SIZE
    wanted = points_of(arguments, size, block_bytes=_BLOCKS, depth=_DEPTHS) or ()
    # With fewer bytes than its queue holds, a point would be no deeper than another.
    points = [point for point in wanted if point.in_flight <= size]
    csv = arguments.csv or f"{os.path.splitext(arguments.out)[0]}.csv"
    path = os.path.abspath(arguments.path)
    with ResultsFile(arguments.out) as file:
        left = [p for p in points if not file.has(p.command(path, arguments.rounds))]
        if left:
            with progress() as tick, Site(path, size, lambda text: tick(0, 1, text)) as site:
                Bench(site, arguments.rounds, tick, file.add).run(left)
    results = read_results(arguments.out)
    write_csv(csv, results.rows)
    if arguments.png:
        from tensorspill.profiling.pictures.together import draw_results

        draw_results(results, arguments.png)
    left_out = len(wanted) - len(points)
    if arguments.json:
        found = {
            "points": len(points),
            "measured": len(left),
            "left_out": left_out,
            "out": arguments.out,
            "csv": csv,
            "rows": [row.to_json() for row in results.rows],
            "notes": results.notes,
        }
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    from tensorspill.commands.measured_text import plain, show_rows

    console = output()
    show_rows(console, results.rows)
    done = len(points) - len(left)
    text = f"{len(left)} points measured, {done} were there; in {arguments.out} and {csv}"
    console.print(plain(text), markup=False, overflow="fold")
    if left_out:
        text = f"{left_out} points left out: --size does not fill their queue"
        console.print(text, markup=False, overflow="fold")
    for note in results.notes:
        console.print(plain(note), markup=False, overflow="fold")
    return 0
