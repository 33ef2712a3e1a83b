"""What the demonstration says before and after, for people."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tensorspill.demo.corpus import Corpus
from tensorspill.demo.place import Mount
from tensorspill.demo.report import Report
from tensorspill.demo.spilled import Needs
from tensorspill.demo.training import Recipe
from tensorspill.pool.sizes import format_bytes

__all__ = ["introduction", "summary"]

_BARS = "▁▂▃▄▅▆▇█"
_MOST_BARS = 24


def introduction(
    recipe: Recipe, corpus: Corpus, needs: Needs, budget: int, folder: Path, mount: Mount
) -> RenderableType:
    """Return what will be done; `folder` is where the spill file will be."""
    shape = recipe.shape
    where = "memory, not a drive" if mount.in_memory else mount.source
    rows = {
        "model": f"byte-level GPT, {shape.layers} blocks, {needs.model / 4e6:.1f} M parameters, "
        f"{format_bytes(needs.model)}, and AdamW's states, {format_bytes(needs.states)}",
        "text": f"{corpus.name}, {format_bytes(corpus.text.numel())}",
        "budget": f"{format_bytes(budget)} of parameters, gradients and states in memory at a "
        f"time; model and states are {needs.total / budget:.1f} times that",
        "folder": f"{folder} ({mount.kind} on {where})",
    }
    title = Text("tensorspill demo", style="bold")
    title.append("  the same training twice: from memory, and from the drive", style="not bold dim")
    return Group("", title, "", _pairs(rows), "")


def summary(report: Report, console: Console) -> RenderableType:
    """Return what came out."""
    return Group(
        _both_runs(report, _can_show(console, _BARS)),
        _pairs(_about_the_drive(report)),
        "",
        _verdict(report, _can_show(console, "✔✘")),
        "",
    )


def _pairs(rows: dict[str, str]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows.items():
        grid.add_row(name, value)
    return Padding(grid, (0, 0, 0, 2))


def _both_runs(report: Report, bars: bool) -> RenderableType:
    memory, drive = report.memory, report.spilled.run
    steps, peak = report.recipe.steps, report.spilled.peak_bytes
    table = Table(box=SIMPLE_HEAD, pad_edge=True)
    table.add_column("", style="dim")
    table.add_column("in memory", justify="right", overflow="fold")
    table.add_column("from the drive", justify="right", overflow="fold")
    if bars:
        table.add_row("loss, by step", _curve(memory.losses), _curve(drive.losses))
    table.add_row("first loss", repr(memory.losses[0]), repr(drive.losses[0]))
    table.add_row("last loss", repr(memory.losses[-1]), repr(drive.losses[-1]))
    everything = report.needs.total + report.needs.model
    table.add_row("memory", format_bytes(everything), format_bytes(peak))
    table.add_row(
        "time for a step",
        f"{memory.seconds / steps:.3f} s",
        f"{drive.seconds / steps:.3f} s",
    )
    return table


def _about_the_drive(report: Report) -> dict[str, str]:
    moved, drive = report.spilled.moved, report.spilled.drive
    paths = ", ".join(
        f"{format_bytes(nbytes)} {path}"
        for path, nbytes in sorted(moved.by_path.items(), key=lambda item: -item[1])
    )
    return {
        "moved": f"{format_bytes(moved.bytes_read)} read and {format_bytes(moved.bytes_written)} "
        f"written: {paths}",
        "rate": f"{moved.gbps:.2f} GB/s, {100 * moved.gbps / report.drive_gbps:.0f} % of what the "
        f"drive gives for this mix with large tensors (read {drive.read / 1e9:.2f}, write "
        f"{drive.write / 1e9:.2f} GB/s)",
        "hidden": f"{moved.hidden_pct:.1f} % of the transfers' time passed behind compute; a step "
        f"takes {report.slowdown:.2f} times as long as in memory",
        "memory": f"at most {format_bytes(report.spilled.peak_bytes)} of parameters, gradients "
        f"and optimizer states, the budget is {format_bytes(report.budget_bytes)}",
    }


def _verdict(report: Report, marks: bool) -> RenderableType:
    claims = (
        (report.losses_equal, "All losses are equal to the last bit", "The losses differ"),
        (report.weights_equal, "so are all parameters", "the parameters differ"),
        (report.within_budget, "memory stayed in budget", "memory exceeded the budget"),
    )
    parts = [yes if holds else no for holds, yes, no in claims]
    text = f"{parts[0]}, {parts[1]}, and {parts[2]}."
    good, bad = ("✔ ", "✘ ") if marks else ("OK: ", "FAILED: ")
    style = "bold green" if report.holds else "bold red"
    return Padding(Text((good if report.holds else bad) + text, style=style), (0, 0, 0, 2))


def _curve(losses: Sequence[float]) -> str:
    """Return a line of bars, the highest for the highest loss."""
    count = min(_MOST_BARS, len(losses))
    picked = [losses[index * len(losses) // count] for index in range(count)]
    low, high = min(picked), max(picked)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((loss - low) * scale)] for loss in picked)


def _can_show(console: Console, text: str) -> bool:
    try:
        text.encode(console.encoding)
    except UnicodeEncodeError:
        return False
    return True
