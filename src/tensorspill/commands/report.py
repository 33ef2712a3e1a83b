"""``tensorspill report``: results as one HTML page that needs nothing else."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorspill.profiling.rows import Results

__all__ = ["HELP", "add_arguments", "run"]

HELP = "make one self-contained HTML page of results"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help="results of bench or sweep: JSON lines or CSV")
    add("--out", default="report.html", metavar="PAGE", help="what to write (report.html)")
    add("--title", default="Storage measured by tensorspill", help="of the page")
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Write the page; return 0, or 1 if something of the files could not be read."""
    from tensorspill.commands.measured_text import output, plain
    from tensorspill.errors import BrokenError, UnsupportedError
    from tensorspill.profiling.report import report
    from tensorspill.profiling.rows import Results, read_results

    results = sum((read_results(name) for name in arguments.files), Results())
    for name in arguments.files:
        if os.path.exists(arguments.out) and os.path.samefile(name, arguments.out):
            raise UnsupportedError("The page would take the place of results", path=name)
    page = report(results, title=arguments.title)
    try:
        with open(arguments.out, "w", encoding="utf-8") as file:
            file.write(page)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't write the page", path=arguments.out) from error
    if arguments.json:
        _say(arguments.out, len(page.encode()), results)
        return 1 if results.notes else 0
    console = output()
    for note in results.notes:
        console.print(plain(note), markup=False, overflow="fold")
    size = f"{len(page.encode()) / 1e6:.1f} MB"
    said = f"{len(results.rows)} points, {len(results.measured)} measured; {size}"
    console.print(plain(f"{arguments.out}: {said}"), markup=False, overflow="fold")
    return 1 if results.notes else 0


def _say(path: str, nbytes: int, results: Results) -> None:
    """Print what was written as JSON."""
    said = {
        "page": path,
        "bytes": nbytes,
        "points": len(results.rows),
        "measured": len(results.measured),
        "notes": list(results.notes),
    }
    sys.stdout.write(json.dumps(said) + "\n")
