"""Panel B: the rate by block, a curve for each depth, below the limits that are known."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from tensorspill.profiling.ceilings import Ceiling
from tensorspill.profiling.pictures.choosing import (
    Cell,
    alike,
    cells,
    derived_ceilings,
    described,
)
from tensorspill.profiling.pictures.drawing import (
    INK,
    SOFT,
    binary,
    inches,
    note_below,
    painting,
    say_empty,
    shades,
    shortened,
    title,
)
from tensorspill.profiling.pictures.placing import apart
from tensorspill.profiling.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["roofline"]

_POINTS = 7.5
_DASHES = (0, (6, 2))


def roofline(
    rows: Iterable[Row],
    axes: Axes | None = None,
    *,
    direction: str | None = None,
    ceilings: Sequence[Ceiling] | None = None,
) -> Figure:
    """Draw the rate by block, both logarithmic, and the limits as lines.

    Parameters
    ----------
    rows : iterable of Row
        Of all sorts; the most that differ in block and depth alone are drawn.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.
    direction : {"read", "write"}, optional
    ceilings : sequence of Ceiling, optional
        By default those that the rows tell of.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    rows = tuple(rows)
    shown = alike(rows, direction)
    rates = cells(shown)
    with painting(axes, 7.6, 4.6) as (figure, axes):
        if not rates:
            say_empty(axes, f"Roofline: no {direction or 'transfer'} was measured")
            return figure
        way = shown[0].direction
        known = derived_ceilings(rows, way) if ceilings is None else ceilings
        limits = [limit for limit in known if limit.gbps]
        _curves(axes, rates)
        _name_axes(axes, rates, limits)
        title(axes, f"B  {way}: rate by block, and its limits", described(shown))
        missing = [limit.name for limit in known if not limit.gbps]
        if missing:
            note_below(axes, f"not known: {', '.join(missing)}")
        _label_limits(figure, axes, limits)
    return figure


def _curves(axes: Axes, rates: dict[Cell, tuple[float, float]]) -> None:
    depths = sorted({depth for _, depth in rates})
    for depth, (colour, marker) in zip(depths, shades(len(depths)), strict=True):
        blocks = sorted(block for block, other in rates if other == depth)
        values = [rates[block, depth][0] for block in blocks]
        # Down to nothing can't be drawn on a logarithmic axis.
        spreads = [min(rates[block, depth][1], 0.9 * value) for block, value in
                   zip(blocks, values, strict=True)]  # fmt: skip
        axes.errorbar(
            blocks,
            values,
            yerr=spreads,
            color=colour,
            marker=marker,
            markersize=5.5,
            markeredgecolor="white",
            markeredgewidth=0.6,
            lw=1.6,
            elinewidth=0.8,
            capsize=2,
            label=f"{depth:,}",
            zorder=3,
        )
    axes.legend(
        title="depth", title_fontsize=8, loc="lower right", ncols=1 if len(depths) < 5 else 2
    )


def _name_axes(
    axes: Axes, rates: dict[Cell, tuple[float, float]], limits: Sequence[Ceiling]
) -> None:
    import matplotlib.ticker as ticks

    blocks = sorted({block for block, _ in rates})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlim(blocks[0] / 1.5, blocks[-1] * 1.5)
    known = [rate for rate, _ in rates.values()] + [rate + more for rate, more in rates.values()]
    known += [limit.gbps or 0.0 for limit in limits]
    positive = [value for value in known if value > 0] or [1.0]
    axes.set_ylim(min(positive) / 1.6, max(positive) * 1.4)
    step = -(-len(blocks) // 7)
    axes.set_xticks(blocks[::step], [binary(block) for block in blocks[::step]])
    axes.xaxis.set_minor_locator(ticks.NullLocator())
    axes.yaxis.set_major_locator(ticks.LogLocator(10, (1.0, 2.0, 5.0), numticks=15))
    axes.yaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(ticks.NullFormatter())
    axes.set_xlabel("block (bytes of an operation, log)")
    axes.set_ylabel("rate (GB/s, decimal, log)")
    axes.grid(True, lw=0.6)
    axes.set_axisbelow(True)


def _label_limits(figure: Figure, axes: Axes, limits: Sequence[Ceiling]) -> None:
    """Draw the limits, and write beside the picture what each is, one below the other."""
    if not limits:
        return
    figure.draw_without_rendering()
    high = axes.get_position().height * inches(axes)[1]
    # Two lines of text and a little.
    gap = 2.5 * _POINTS / 72 / max(high, 0.5)
    ordered = sorted(limits, key=lambda limit: limit.gbps or 0.0)
    room = max(1, int(1 / gap - 0.3))
    drawn, rest = ordered[:room], ordered[room:]
    place = axes.transAxes.inverted()
    at = [place.transform(axes.transData.transform((1, limit.gbps or 0.0)))[1] for limit in drawn]
    for limit, y, to in zip(drawn, at, apart(at, gap, gap / 3, 1 - gap / 3), strict=True):
        axes.axhline(limit.gbps or 0.0, color=INK, lw=1.0, ls=_DASHES, zorder=2)
        more = f" (and {len(rest)} higher)" if rest and limit is drawn[-1] else ""
        axes.annotate(
            f"{shortened(limit.name, 28)}\n{limit.gbps:.2f} GB/s{more}",
            xy=(1, y),
            xytext=(1.06, to),
            xycoords="axes fraction",
            textcoords="axes fraction",
            fontsize=_POINTS,
            color=INK,
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": SOFT,
                "lw": 0.7,
                "relpos": (0, 0.5),
                "shrinkA": 1,
                "shrinkB": 0,
            },
        )
