"""Panel F: the rate of one point, round after round: whether it holds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tensorspill.profiling.pictures.choosing import described
from tensorspill.profiling.pictures.drawing import (
    INK,
    binary,
    narrow,
    note_below,
    painting,
    say_empty,
    title,
)
from tensorspill.profiling.rows import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["longest", "steady_state"]

_LINE, _BAND = "#1e3a8a", "#dbeafe"
#: Seconds that say something about a drive that gets slower when its fast part is full.
_MINUTE = 60.0


def steady_state(row: Row | None, rounds: Sequence[float] = (), axes: Axes | None = None) -> Figure:
    """Draw the rate of each round against the time for which the point was moving bytes.

    Pauses between rounds, in which bytes are compared, are left out.

    Parameters
    ----------
    row : Row or None
        The point.
    rounds : sequence of float
        GB/s of its rounds, in order.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    rates = [rate for rate in rounds if rate > 0]
    with painting(axes, 7.2, 3.6) as (figure, axes):
        if row is None or not rates or not row.total_bytes:
            say_empty(axes, "Steady state: no rounds were recorded")
            return figure
        ends = _ends(row.total_bytes, rates)
        _paint(axes, ends, rates)
        setting = f"{binary(row.block_bytes or 0)} x {row.depth}"
        head = f"F  {row.direction}, {setting}: {ends[-1]:.0f} s of transfer"
        title(axes, head, described([row]))
        note_below(axes, _said(ends, rates))
    return figure


def longest(results: Results) -> tuple[Row | None, tuple[float, ...]]:
    """Return the row whose rounds took longest together, with the GB/s of these."""
    best: tuple[float, Row | None, tuple[float, ...]] = (0.0, None, ())
    for row, rounds in zip(results.rows, results.rounds, strict=True):
        rates = [rate for rate in rounds if rate > 0]
        if row.total_bytes and rates:
            seconds = _ends(row.total_bytes, rates)[-1]
            if seconds > best[0]:
                best = seconds, row, rounds
    return best[1], best[2]


def _ends(nbytes: int, rates: Sequence[float]) -> list[float]:
    found, at = [], 0.0
    for rate in rates:
        at += nbytes / rate / 1e9
        found.append(at)
    return found


def _paint(axes: Axes, ends: Sequence[float], rates: Sequence[float]) -> None:
    middle = statistics.median(rates)
    if len(rates) > 3:
        low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
        axes.axhspan(low, high, color=_BAND, zorder=0, label="middle half of the rounds")
    axes.axhline(middle, color=INK, lw=1.0, ls=(0, (6, 2)), label=f"median {middle:.2f} GB/s")
    axes.stairs(rates, [0.0, *ends], color=_LINE, lw=1.4, baseline=None, label="a round")
    if len(rates) < 40:
        begins = [0.0, *ends[:-1]]
        centres = [(a + b) / 2 for a, b in zip(begins, ends, strict=True)]
        axes.plot(centres, rates, ls="", marker="o", ms=3.5, color=_LINE)
    axes.set_xlim(0, ends[-1])
    axes.set_ylim(0, 1.25 * max(rates))
    axes.set_xlabel("time under transfer (s; pauses for comparing left out)")
    axes.set_ylabel("rate (GB/s, decimal)")
    axes.grid(True, lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="lower right", ncols=1 if narrow(axes) else 3)


def _said(ends: Sequence[float], rates: Sequence[float]) -> str:
    """Say how the end compares with the beginning, and whether it was long enough to tell."""
    short = f"{ends[-1]:.0f} of {_MINUTE:.0f} s: too short to tell of a steady state"
    if len(rates) < 6:
        return short
    third = len(rates) // 3
    change = statistics.median(rates[-third:]) / statistics.median(rates[:third]) - 1
    said = f"the last third against the first: {100 * change:+.0f} %"
    return said if ends[-1] >= _MINUTE else f"{said}; {short}"
