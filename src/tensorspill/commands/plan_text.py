"""A writer plan in the terminal: how long, compared with what, and how busy everything is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tensorspill.topology.writers.alternatives import alternatives
from tensorspill.topology.writers.explain import bottlenecks, reason, size_text
from tensorspill.topology.writers.plan import WriterPlan

__all__ = ["explain", "show"]

_BAR = 28
#: Columns of a terminal that take the whole tables.
_WIDE = 80
#: Resources of a kind that are busy alike share one bar; no kind has more bars than this.
_BARS = 6
_PIECES = 24


def show(plan: WriterPlan, console: Console | None = None) -> None:
    """Print a plan: its figures, those of simpler rules, and a load bar for each resource."""
    console = console or Console(highlight=False)
    total = int(plan.slices.nbytes.sum())
    console.print(
        f"[bold]{size_text(total)}[/] in {len(plan.slices):,} slices, held by "
        f"{plan.placement.ranks:,} ranks on {plan.placement.machines:,} machines"
    )
    if plan.makespan:
        rate = float(total / plan.makespan) / 1000
        console.print(
            f"[bold]{_seconds(plan.makespan_s)}[/] to write, at {rate:,.1f} GB/s. {_bound(plan)}"
        )
    names = bottlenecks(plan, 3)
    if names:
        more = int(np.count_nonzero(plan.tight)) - len(names)
        tail = f" and {more:,} more" if more else ""
        console.print(f"T* is set by {escape(', '.join(names))}{tail}")
    for note in plan.placement.notes:
        console.print(f"note: {escape(note)}", style="yellow")
    console.print()
    _show_rules(console, plan)
    _show_load(console, plan)
    console.print(
        f"digest {plan.digest}, planned in {_seconds(plan.planning_s)} "
        f"(the first plan of a process includes loading or compiling)",
        style="dim",
    )


def _bound(plan: WriterPlan) -> str:
    """Say how far a plan is from T*."""
    if plan.gap < 5e-4:
        return "That is the bound T*: no plan can be faster"
    which = "Without limits, no plan" if plan.relaxed else "No plan"
    above = f"{plan.gap:.2%}" if plan.gap < 1 else f"{plan.gap + 1:.3g} times"
    tail = "above it" if plan.gap < 1 else "of it"
    bound = _seconds(plan.lower_bound_s)
    return f"{which} can be faster than T* = {bound}; this one is {above} {tail}"


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.3g} s" if value < 1000 else f"{value:,.0f} s"
    return f"{value * 1e3:.3g} ms" if value >= 1e-3 else f"{value * 1e6:.3g} µs"


def _table(titles: Sequence[str]) -> Table:
    """Return a table of a first column, figures, and a last column that may be left out."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(titles[0], no_wrap=True)
    for title in titles[1:]:
        table.add_column(title, justify="right", no_wrap=True)
    return table


def _show_rules(console: Console, plan: WriterPlan) -> None:
    wide = console.width >= _WIDE
    table = _table(["rule", "time", "x T*", *(["writers"] if wide else [])])
    if wide:
        table.add_column("what it does")
    bound = max(plan.lower_bound_s, 1e-9)
    ours = _figures(plan.makespan_s, bound, len(plan.writers))
    rows = [("[bold]this plan[/]", *ours, "as much each as it can write")]
    once = ", one copy only" if dict(plan.options)["copies"] > 1 else ""
    for other in alternatives(plan.slices, plan.placement):
        if other.makespan_s is None:
            rows.append((other.rule, "-", "-", "-", escape(other.why_not)))
        else:
            figures = _figures(other.makespan_s, bound, other.writers)
            rows.append((other.rule, *figures, other.meaning + once))
    for row in rows:
        table.add_row(*(row if wide else row[:3]))
    console.print(table)


def _figures(span: float, bound: float, writers: int) -> tuple[str, str, str]:
    return _seconds(span), f"{span / bound:.2f}", f"{writers:,}"


def _show_load(console: Console, plan: WriterPlan) -> None:
    """Print a bar for resources that are about equally busy; on a narrow terminal, a figure."""
    wide = console.width >= _WIDE
    table = _table(["resource", "count", *(["rate", "load of each"] if wide else [])])
    bar = _BAR if wide else max(console.width - 46, 0)
    table.add_column("busy", no_wrap=True, min_width=bar + 5)
    for label, count, rate, load, (most, tight) in _rows(plan):
        shown = (label, count, rate, load) if wide else (label, count)
        table.add_row(*shown, _bar(most, tight, bar))
    console.print(table)


def _rows(plan: WriterPlan) -> Iterator[tuple[str, str, str, str, tuple[float, bool]]]:
    """Yield a row for resources of one kind and rate that are about equally busy."""
    forest, span = plan.placement.forest, float(plan.makespan) or 1.0
    kinds = _kinds(plan)
    busy = plan.load / np.maximum(forest.capacity, 1) / span
    for kind in dict.fromkeys(kinds):
        mine = np.array([k for k, other in enumerate(kinds) if other == kind])
        keys = [(int(forest.capacity[k]), round(float(busy[k]) * 10)) for k in mine.tolist()]
        groups: dict[tuple[int, int], list[int]] = {}
        for k, key in zip(mine.tolist(), keys, strict=True):
            groups.setdefault(key, []).append(k)
        ordered = sorted(groups.values(), key=lambda g: -float(busy[g].max()))
        for group in ordered[: _BARS - (len(ordered) > _BARS)]:
            yield _row(plan, kind, group, busy)
        if len(ordered) > _BARS:
            rest = [k for group in ordered[_BARS - 1 :] for k in group]
            yield _row(plan, f"{kind} (others)", rest, busy)


def _row(
    plan: WriterPlan, kind: str, group: list[int], busy: np.ndarray
) -> tuple[str, str, str, str, tuple[float, bool]]:
    forest = plan.placement.forest
    label = forest.names[group[0]] if len(group) == 1 else kind
    rates = forest.capacity[group]
    rate = f"{_span(rates / 1000)} GB/s" if rates.any() else "excluded"
    label = label if rates.any() else f"{label} (excluded)"
    load = f"{size_text(float(plan.load[group].mean()))}"
    how = float(busy[group].max()), bool(plan.tight[group].any())
    return escape(label), f"{len(group):,}", rate, load, how


def _span(values: np.ndarray) -> str:
    low, high = float(values.min()), float(values.max())
    return f"{low:.3g}" if low == high else f"{low:.3g}-{high:.3g}"


def _bar(part: float, tight: bool, width: int) -> str:
    full = min(round(part * width), width)
    style = "bold red" if tight else "green"
    return f"[{style}]{'█' * full}[/][dim]{'·' * (width - full)}[/] {part:4.0%}"


def _kinds(plan: WriterPlan) -> list[str]:
    """Return what kind of thing each resource is."""
    forest = plan.placement.forest
    first = dict(plan.placement.kinds)
    kinds = []
    for k in range(len(forest.capacity)):
        kind = next(name for name, end in first.items() if k < end)
        kinds.append(kind)
    return kinds


def explain(plan: WriterPlan, rank: int, console: Console | None = None) -> None:
    """Print what a rank writes, and why."""
    console = console or Console(highlight=False)
    why = reason(plan, rank)
    console.print(f"[bold]rank {rank}[/] writes {size_text(why.nbytes)} in {why.pieces} pieces")
    console.print(escape(f"Why: {why.text}."))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("its bytes pass")
    table.add_column("busy", no_wrap=True)
    bar = _BAR if console.width >= _WIDE else max(console.width - 46, 0)
    for name, part in why.busy:
        table.add_row(escape(name), _bar(part, name == why.bottleneck and part >= 0.995, bar))
    console.print(table)
    _show_pieces(console, plan, rank)


def _show_pieces(console: Console, plan: WriterPlan, rank: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("slice", "bytes from", "to", "size", "writer"):
        table.add_column(title, justify="left" if title == "slice" else "right")
    pieces = plan.pieces_of(rank)
    for piece in pieces[:_PIECES]:
        share = plan.share(rank, piece.slice)
        writer = "" if share is None else f"{share[1] + 1} of {share[0]}"
        edges = f"{piece.start:,}", f"{piece.stop:,}"
        table.add_row(escape(piece.slice), *edges, size_text(piece.nbytes), writer)
    if pieces:
        console.print(table)
    if len(pieces) > _PIECES:
        console.print(f"and {len(pieces) - _PIECES} more pieces (all with --json)", style="dim")
