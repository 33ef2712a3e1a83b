"""Printing results: a table for people, Markdown for the README, JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.machine import Machine
from benchmarks.rows import Row, Verdict
from tensorspill.profiling.rounds import Results

__all__ = ["Report", "SuiteReport", "markdown", "print_report", "write_json"]

_COLUMNS = ("case", "ours", "reference", "ratio median [q1, q3]", "target", "noise", "verdict")
_COLOURS = {
    Verdict.MET: "green",
    Verdict.EQUAL: "yellow",
    Verdict.NOT_MET: "bold red",
    Verdict.NOT_MEASURED: "magenta",
    Verdict.REPORTED: "dim",
}


@dataclass(frozen=True, slots=True)
class SuiteReport:
    """What one suite found.

    Attributes
    ----------
    rows : sequence of Row
    notes : sequence of str
        What else is to be known, such as which pages were cached.
    results : dict of str to Results
        All samples.
    """

    rows: Sequence[Row]
    notes: Sequence[str] = ()
    results: dict[str, Results] = field(default_factory=dict)

    def record(self) -> dict[str, Any]:
        """Return the report for JSON."""
        samples = {
            group: {
                case: [None if s is None else [s.seconds, s.nbytes, s.cpu] for s in runs]
                for case, runs in results.samples.items()
            }
            for group, results in self.results.items()
        }
        return {
            "rows": [row.record() for row in self.rows],
            "notes": list(self.notes),
            "samples": samples,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What a run found."""

    machine: Machine
    settings: dict[str, Any]
    suites: dict[str, SuiteReport]
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "machine": self.machine.record(),
            "settings": self.settings,
            "seconds": self.seconds,
            "suites": {name: suite.record() for name, suite in self.suites.items()},
        }


def print_report(report: Report, console: Console, title: str = "Host path") -> None:
    """Print the machine, a table, and the notes."""
    for line in report.machine.lines():
        console.print(escape(line), style="dim", highlight=False)
    table = Table(title=title)
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for suite in report.suites.values():
        for row in suite.rows:
            colour = _COLOURS[row.verdict]
            *cells, verdict = _cells(row)
            table.add_row(*map(escape, cells), f"[{colour}]{escape(verdict)}[/]")
        table.add_section()
    console.print(table)
    for line in _notes(report):
        console.print(escape(line), highlight=False)


def markdown(report: Report) -> str:
    """Return the table as Markdown, with the machine above and the notes below."""
    lines = [f"{line}  " for line in report.machine.lines()]
    lines += ["", f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    for suite in report.suites.values():
        lines += [f"| {' | '.join(_cells(row))} |" for row in suite.rows]
    return "\n".join([*lines, "", *(f"- {line}" for line in _notes(report))])


def write_json(report: Report, path: Path) -> None:
    """Write everything, every sample included."""
    path.write_text(json.dumps(report.record(), indent=1, ensure_ascii=False) + "\n")


def _cells(row: Row) -> tuple[str, ...]:
    reference = row.reference
    if row.theirs is not None:
        reference += f": {_value(row.theirs, row.unit)}"
    return (
        f"{row.suite}: {row.case}",
        "-" if row.ours is None else _value(row.ours, row.unit),
        reference,
        "" if row.ratio is None else str(row.ratio),
        "" if row.bound is None else str(row.bound),
        "" if row.noise is None else f"±{row.noise:.0%}",
        row.verdict + (f" ({row.note})" if row.note else ""),
    )


def _value(value: float, unit: str) -> str:
    digits = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{digits} {unit}".rstrip()


def _notes(report: Report) -> Iterable[str]:
    for name, suite in report.suites.items():
        for note in suite.notes:
            yield f"{name}: {note}"
    settings = ", ".join(f"{name} {value}" for name, value in report.settings.items())
    yield f"settings: {settings}; {report.seconds:.0f} s in all"
