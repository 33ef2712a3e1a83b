"""Panel C: what was reached, as bars, beside every limit."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tensorspill.profiling.ceilings import Ceiling, per_cent
from tensorspill.profiling.pictures.choosing import (
    OTHERS,
    alike,
    derived_ceilings,
    described,
    directions,
    ours,
)
from tensorspill.profiling.pictures.drawing import (
    INK,
    SOFT,
    characters,
    narrow,
    painting,
    say_empty,
    shortened,
    title,
)
from tensorspill.profiling.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["limits"]

#: What a bar is: its colour, from dark to light, and its hatch.
_OURS, _MEASURED, _KNOWN = ("#1e3a8a", ""), ("#f59e0b", "////"), ("#fde68a", "....")


@dataclass(frozen=True, slots=True)
class _Bar:
    name: str
    gbps: float | None
    look: tuple[str, str]
    text: str
    spread: float = 0.0


def limits(
    rows: Iterable[Row],
    axes: Axes | None = None,
    *,
    direction: str | None = None,
    ceilings: Sequence[Ceiling] | None = None,
) -> Figure:
    """Draw the best rate of each of our paths beside every limit, known or measured.

    Parameters
    ----------
    rows : iterable of Row
        Of all sorts.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.
    direction : {"read", "write"}, optional
        By default that of which there are more rows.
    ceilings : sequence of Ceiling, optional
        By default those that the rows tell of.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    rows = tuple(rows)
    ways = directions(rows)
    way = direction or (alike(rows)[0].direction if ways else "read")
    known = derived_ceilings(rows, way) if ceilings is None else ceilings
    best = _best(rows, way)
    bars = [*_ours(best, known), *_limits(best, known), *_not_measured(rows, way, known)]
    with painting(axes, 7.6, 1.5 + 0.42 * max(3, len(bars))) as (figure, axes):
        if not best and not known:
            say_empty(axes, f"Limits: no {way} was measured")
            return figure
        _paint(axes, bars)
        title(axes, f"C  {way}: what was reached, and every limit", described(best))
    return figure


def _best(rows: Sequence[Row], direction: str) -> list[Row]:
    """Return the fastest row of each engine and memory."""
    found: dict[tuple[object, ...], Row] = {}
    for row in ours(rows):
        key = row.engine, row.gpu
        if row.direction == direction and _rate(row) > _rate(found.get(key)):
            found[key] = row
    return sorted(found.values(), key=_rate, reverse=True)


def _rate(row: Row | None) -> float:
    return -1.0 if row is None or row.gbps_last_done is None else row.gbps_last_done


def _ours(best: Sequence[Row], known: Sequence[Ceiling]) -> list[_Bar]:
    tightest = min((limit for limit in known if limit.gbps), key=_gbps, default=None)
    bars = []
    for row in best:
        share = per_cent(row.gbps_last_done, tightest)
        told = "" if share is None else f", {share:.0f} % of the tightest limit"
        name = f"{row.engine}, {row.label}"
        text = f"{_rate(row):.2f} GB/s{told}"
        bars.append(_Bar(name, _rate(row), _OURS, text, row.gbps_stdev or 0.0))
    return bars


def _gbps(limit: Ceiling) -> float:
    return limit.gbps or 0.0


def _limits(best: Sequence[Row], known: Sequence[Ceiling]) -> list[_Bar]:
    bars = []
    for limit in sorted(known, key=lambda each: (each.gbps is None, each.gbps or 0.0)):
        if limit.gbps is None:
            bars.append(_Bar(limit.name, None, _KNOWN, limit.why))
            continue
        share = per_cent(best[0].gbps_last_done, limit) if best else None
        told = "" if share is None else f", of which {share:.0f} % reached"
        look = _MEASURED if limit.why.startswith("measured") else _KNOWN
        bars.append(_Bar(limit.name, limit.gbps, look, f"{limit.gbps:.2f} GB/s{told}"))
    return bars


def _not_measured(rows: Sequence[Row], direction: str, known: Sequence[Ceiling]) -> list[_Bar]:
    """Return programs whose rate is no limit of the list: measured alone, or not at all."""
    bars = []
    for name in sorted(OTHERS):
        mine = [row for row in rows if row.engine == name and row.direction == direction]
        rates = [row.gbps_last_done for row in mine if row.gbps_last_done is not None]
        if rates and not any(limit.name.startswith(f"{name} ") for limit in known):
            rate = statistics.median(rates)
            bars.append(_Bar(name, rate, _MEASURED, f"{rate:.2f} GB/s"))
        elif mine and not rates:
            bars.append(_Bar(name, None, _KNOWN, mine[0].path_taken))
    return bars


def _paint(axes: Axes, bars: Sequence[_Bar]) -> None:
    import matplotlib.patches as shapes

    most = max((bar.gbps or 0.0 for bar in bars), default=0.0) or 1.0
    room = characters(axes, 8)
    for y, bar in enumerate(bars):
        colour, hatch = bar.look
        if bar.gbps is None:
            text = shortened(bar.text, room - 26)
            axes.text(0.01 * most, y, text, va="center", fontsize=8, color=SOFT, style="italic")
            continue
        axes.barh(
            y, bar.gbps, 0.62, color=colour, hatch=hatch, edgecolor=INK, lw=0.6, zorder=2,
            xerr=bar.spread or None, error_kw={"lw": 1.0, "capsize": 2, "ecolor": "#6b7280"},
        )  # fmt: skip
        # Beside the bar, or within a long one, on a ground of white.
        inside = bar.gbps > 0.55 * most
        text = bar.text.partition(",")[0] if narrow(axes) else bar.text
        axes.text(
            bar.gbps - 0.015 * most if inside else bar.gbps + bar.spread + 0.015 * most,
            y,
            text,
            ha="right" if inside else "left",
            va="center",
            fontsize=8,
            zorder=4,
            bbox={"fc": "white", "ec": "none", "pad": 1.2} if inside else None,
        )
    longest = 20 if narrow(axes) else 30
    axes.set_yticks(range(len(bars)), [shortened(bar.name, longest) for bar in bars])
    axes.set_ylim(len(bars) - 0.4, -0.6)
    axes.set_xlim(0, 1.06 * max(most, max((b.gbps or 0) + b.spread for b in bars)))
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("rate (GB/s, decimal)")
    axes.grid(True, axis="x", lw=0.6)
    axes.set_axisbelow(True)
    kinds = ((_OURS, "reached"), (_MEASURED, "measured limit"), (_KNOWN, "known limit"))
    handles = [
        shapes.Patch(fc=colour, ec=INK, hatch=hatch, lw=0.6, label=name)
        for (colour, hatch), name in kinds
        if any(bar.look == (colour, hatch) and bar.gbps is not None for bar in bars)
    ]
    axes.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0, -0.16), ncols=1 if narrow(axes) else 3
    )
