"""Progress and rows on a terminal: readable without colour, and however narrow it is."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tensorspill.profiling.rows import Row

__all__ = ["microseconds", "output", "plain", "progress", "show_rows"]

Tick = Callable[[float, float, str], None]

#: Columns below which a table of rows has no room, and a bar has none beside its text.
_NARROW = 90
#: Of what is piped somewhere.
_WIDE = 160


def output() -> Console:
    """Return the console for results."""
    # A terminal of few characters shows another in place of those that it lacks.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_WIDE)


@contextlib.contextmanager
def progress() -> Iterator[Tick]:
    """Show on standard error how far a run is, and the time left; nothing if it is no terminal.

    It is drawn only when told something, so that no thread of it runs while things are timed.
    """
    console = Console(stderr=True)
    columns: list[ProgressColumn] = [TextColumn("{task.description}", markup=False)]
    if console.width >= _NARROW:
        columns = [BarColumn(24), TimeRemainingColumn(), *columns]
    else:
        columns = [TimeRemainingColumn(compact=True), *columns]
    with Progress(
        *columns,
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("starting", total=None)

        def tick(done: float, total: float, text: str) -> None:
            bar.update(task, completed=done, total=total, description=plain(text), refresh=True)

        yield tick


def show_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print rows: as a table, or one below the other where that is too wide."""
    measured = [row for row in rows if row.measured]
    if console.width < _NARROW:
        for row in measured:
            console.print(Text(plain(f"{row.engine} {row.direction} {row.label}"), "bold"))
            console.print(Text(f"  {_rate(row)} GB/s, {row.path_taken}"), overflow="fold")
            console.print(Text(f"  {_limit(row)}"), overflow="fold")
    elif measured:
        console.print(_table(measured))
    for row in rows:
        if not row.measured:
            what = plain(f"{row.engine} {row.direction} {row.label}")
            console.print(Text(f"{what}: {plain(row.path_taken)}", "dim"), overflow="fold")


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("engine", "", "point"):
        table.add_column(name, overflow="fold")
    for name in ("GB/s", "p50 µs", "p99 µs", "CPU %"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("path", overflow="fold")
    table.add_column("of the tightest limit", overflow="fold")
    for row in rows:
        table.add_row(
            Text(plain(row.engine)),
            row.direction,
            Text(plain(row.label)),
            _rate(row),
            microseconds(row.lat_us_p50),
            microseconds(row.lat_us_p99),
            "" if row.cpu_pct is None else f"{row.cpu_pct:.0f}",
            Text(plain(row.path_taken)),
            Text(plain(_limit(row))),
        )
    return table


def _rate(row: Row) -> str:
    spread = f" ±{row.gbps_stdev:.2f}" if row.gbps_stdev is not None and row.rounds > 1 else ""
    return f"{row.gbps_last_done:.2f}{spread}"


def _limit(row: Row) -> str:
    if row.pct_of_ceiling is None:
        return "no limit is known"
    return f"{row.pct_of_ceiling:.0f} % of {row.ceiling_name}"


def microseconds(value: float | None) -> str:
    """Return a latency, or nothing."""
    return "" if value is None else f"{value:,.0f}"


def plain(text: str) -> str:
    """Leave out what would move the cursor or change colours: paths and files may hold it."""
    return "".join(c if c.isprintable() or c == " " else "?" for c in text)
