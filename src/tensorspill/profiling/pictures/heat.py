"""Panel A: the rate by block and depth, with the chosen point in a box."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tensorspill.profiling.pictures.choosing import Cell, alike, cells, described, smallest
from tensorspill.profiling.pictures.drawing import (
    MISSING,
    SOFT,
    binary,
    inches,
    ink_on,
    note_below,
    painting,
    say_empty,
    title,
)
from tensorspill.profiling.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["heat_map"]


def heat_map(
    rows: Iterable[Row],
    axes: Axes | None = None,
    *,
    direction: str | None = None,
    chosen: Cell | None = None,
) -> Figure:
    """Draw the rate of each block and depth.

    Parameters
    ----------
    rows : iterable of Row
        Of all sorts; the most that differ in block and depth alone are drawn.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.
    direction : {"read", "write"}, optional
    chosen : tuple of (int, int), optional
        Block in bytes and depth of the point to put in a box; by default the one with the fewest
        bytes in flight that is within 95 % of the fastest.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    shown = alike(rows, direction)
    rates = cells(shown)
    with painting(axes, 6.8, 4.6) as (figure, axes):
        if not rates:
            say_empty(axes, f"Block and depth: no {direction or 'transfer'} was measured")
            return figure
        blocks = sorted({block for block, _ in rates})
        depths = sorted({depth for _, depth in rates})
        table = [[rates.get((b, d), (math.nan, 0.0))[0] for d in depths] for b in blocks]
        image = axes.imshow(
            table, cmap=_colours(), origin="lower", aspect="auto", vmin=0.0, vmax=_top(rates)
        )
        _name_axes(axes, blocks, depths)
        _write(axes, rates, blocks, depths, image)
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.set_label("rate (GB/s, decimal)")
        bar.outline.set_visible(False)
        title(axes, f"A  {shown[0].direction}: rate by block and depth", described(shown))
        box = chosen or smallest(rates)
        if box is not None and box in rates:
            _box(axes, depths.index(box[1]), blocks.index(box[0]))
            why = "chosen" if chosen else "the smallest within 95 % of the best"
            setting = f"{binary(box[0])} x {box[1]}, {rates[box][0]:.2f} GB/s"
            note_below(axes, f"in the box: {setting}: {why}")
    return figure


def _top(rates: dict[Cell, tuple[float, float]]) -> float:
    return max(rate for rate, _ in rates.values()) or 1.0


def _colours() -> Any:
    import matplotlib as mpl

    return mpl.colormaps["cividis"].with_extremes(bad=MISSING)


def _name_axes(axes: Axes, blocks: list[int], depths: list[int]) -> None:
    axes.set_xticks(range(len(depths)), [f"{depth:,}" for depth in depths])
    axes.set_yticks(range(len(blocks)), [binary(block) for block in blocks])
    axes.set_xlabel("depth (operations in flight for each thread)")
    axes.set_ylabel("block (bytes of an operation)")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _write(
    axes: Axes,
    rates: dict[Cell, tuple[float, float]],
    blocks: list[int],
    depths: list[int],
    image: Any,
) -> None:
    """Write each rate into its cell, and mark cells that were not measured."""
    width, height = inches(axes)
    # Inches of a cell, about: axis names, title and scale take the rest.
    wide, high = (width - 2.0) / len(depths), (height - 1.2) / len(blocks)
    points = max(4.5, min(9.0, 16 * wide, 40 * high))
    spreads = wide > 0.55 and high > 0.36 and any(spread for _, spread in rates.values())
    for y, block in enumerate(blocks):
        for x, depth in enumerate(depths):
            found = rates.get((block, depth))
            if found is None:
                _hatch(axes, x, y)
                continue
            rate, spread = found
            text = f"{rate:.2f}" if rate < 99.95 else f"{rate:.0f}"
            if spreads:
                text += f"\n±{spread:.2f}"
            axes.text(
                x,
                y,
                text,
                ha="center",
                va="center",
                fontsize=points,
                color=ink_on(image.cmap(image.norm(rate))),
            )


def _hatch(axes: Axes, x: int, y: int) -> None:
    import matplotlib.patches as shapes

    axes.add_patch(
        shapes.Rectangle((x - 0.5, y - 0.5), 1, 1, fc=MISSING, ec="#9ca3af", hatch="////", lw=0)
    )
    axes.text(x, y, "-", ha="center", va="center", color=SOFT)


def _box(axes: Axes, x: int, y: int) -> None:
    """Frame a cell in black on white, which is seen on every colour."""
    import matplotlib.patches as shapes

    for colour, width in (("white", 5.0), ("black", 2.0)):
        axes.add_patch(
            shapes.Rectangle(
                (x - 0.47, y - 0.47), 0.94, 0.94, fc="none", ec=colour, lw=width, zorder=5
            )
        )
