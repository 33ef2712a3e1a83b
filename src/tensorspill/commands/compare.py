"""``tensorspill compare``: what became slower or faster between two files of results."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tensorspill.profiling.compare import Change, Compared

__all__ = ["HELP", "add_arguments", "run"]

HELP = "say what is slower or faster in one file of results than in another, by a rank test"

_SAME, _SLOWER = 0, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    add = parser.add_argument
    add("before", metavar="A", help="results of bench or sweep, as JSON lines or CSV")
    add("after", metavar="B", help="the same, measured later")
    add("--threshold", type=float, default=5.0, metavar="PCT", help="what counts as a change (5)")
    add("--alpha", type=float, default=0.05, metavar="P", help="share of false alarms (0.05)")
    add("--json", action="store_true", help="print one JSON object, nothing else")


def run(arguments: argparse.Namespace) -> int:
    """Compare and show; return 1 if something is slower, else 0."""
    from tensorspill.errors import UnsupportedError
    from tensorspill.profiling.compare import compare
    from tensorspill.profiling.rows import read_results

    before, after = read_results(arguments.before), read_results(arguments.after)
    found = compare(before, after, arguments.threshold / 100, arguments.alpha)
    if not found.changes:
        raise UnsupportedError(
            f"{arguments.before} and {arguments.after} have no measured point in common",
            remedy="Measure the same points, with the same --size",
        )
    if arguments.json:
        sys.stdout.write(json.dumps(found.to_json()) + "\n")
    else:
        _show(found)
    return _SLOWER if found.slower else _SAME


def _show(found: Compared) -> None:
    from rich.text import Text

    from tensorspill.commands.measured_text import output, plain

    styles = {"slower": "red", "faster": "green", "same": ""}
    console = output()
    for change in found.changes:
        line = Text(plain(f"{change.label}: {_rates(change)}, "))
        line.append(change.verdict, styles[change.verdict])
        line.append(f" (p {change.p:.2g}, adjusted {change.adjusted:.2g}, {change.basis} ")
        line.append(f"{change.samples[0]} and {change.samples[1]})")
        console.print(line, overflow="fold")
    for name, points in (("A", found.only_before), ("B", found.only_after)):
        if points:
            text = f"Only in {name}: {'; '.join(points)}"
            console.print(Text(plain(text), "dim"), overflow="fold")
    for note in found.notes:
        console.print(Text(plain(note), "dim"), overflow="fold")
    counts = [sum(c.verdict == v for c in found.changes) for v in ("slower", "faster", "same")]
    console.print(f"{counts[0]} slower, {counts[1]} faster, {counts[2]} the same", markup=False)


def _rates(change: Change) -> str:
    return f"{change.before:.2f} to {change.after:.2f} GB/s ({change.ratio - 1:+.0%})"
