"""What ``tensorspill bench`` says on a terminal."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from tensorspill.commands.measured_text import output, plain, show_rows
from tensorspill.profiling.bench import Bench, Comparison
from tensorspill.profiling.site import Site

__all__ = ["show", "show_place"]


def show(bench: Bench, site: Site, console: Console | None = None) -> None:
    """Print rows, comparisons and limits."""
    console = console or output()
    show_place(console, site)
    show_rows(console, bench.rows)
    for each in bench.comparisons:
        console.print(Text(plain(_against_fio(each))), overflow="fold")
    console.print(Text("Limits", "bold"))
    for direction, found in bench.ceilings.items():
        for ceiling in found:
            rate = "not known" if ceiling.gbps is None else f"{ceiling.gbps:.2f} GB/s"
            text = f"{direction}: {ceiling.name} {rate} ({ceiling.why})"
            console.print(Text(plain(text), "dim"), overflow="fold")


def show_place(console: Console, site: Site) -> None:
    """Print what is below the folder, and what that means for figures."""
    below = site.storage
    device = below.device or below.why("device")
    console.print(Text(plain(f"{site.path}: {below.filesystem} on {device}")), overflow="fold")
    if below.kind == "memory":
        said = f"{below.filesystem} keeps its files in memory: these are no figures of a drive"
        console.print(Text(said, "bold"), overflow="fold")


def _against_fio(found: Comparison) -> str:
    if found.ratio is None or found.fio_spread is None:
        return f"{found.label}: not compared with fio: {found.why}"
    said = f"{found.label}: {found.ratio} of fio, which is {found.fio_spread} of itself"
    return f"{said}: {'equal' if found.close else 'not equal'} (median and quartiles)"
