"""What the doctor found, in the terminal: readable without colour, and however narrow it is."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tensorspill.doctor.row import Diagnosis, Row

__all__ = ["show"]

_STYLES = {"ok": "green", "no": "red", "unknown": "magenta"}
#: Columns below which a table has no room for texts beside the names of layers.
_NARROW = 70


def show(found: Diagnosis, asked: str, console: Console | None = None) -> None:
    """Print the layers, and whether each backend would work."""
    if console is None:
        # A terminal of few characters shows another in place of those that it lacks.
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")
        console = Console(highlight=False)
    _section(console, "Layers", found.rows)
    _section(console, "Backends", found.backends)
    verdict = found.backend(asked)
    words = {"ok": "would work", "no": "would not work", "unknown": "is not known to work"}
    end = Text("Backend ")
    end.append(asked, "bold").append(f" {words[verdict.state]} in {_plain(found.path)}.")
    console.print(end, overflow="fold")


def _section(console: Console, title: str, rows: Sequence[Row]) -> None:
    console.print(Text(title, "bold"))
    if console.width < _NARROW:
        for row in rows:
            console.print(Text.assemble(f"{row.layer}: ", (row.state, _STYLES[row.state])))
            console.print(Padding(_text(row), (0, 0, 0, 2)), overflow="fold")
        console.print()
        return
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(row.layer), Text(row.state, _STYLES[row.state]), _text(row))
    console.print(table)


def _text(row: Row) -> Text:
    text = Text(_plain(row.evidence), overflow="fold")
    if row.remedy:
        text.append(f"\nRemedy: {_plain(row.remedy)}", "dim")
    return text


def _plain(text: str) -> str:
    """Leave out what would move the cursor or change colours: paths and files may hold it."""
    return "".join(c if c.isprintable() or c == " " else "?" for c in text)
