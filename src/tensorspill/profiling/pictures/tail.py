"""Panel D: how long operations took, from the median to the slowest of ten thousand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tensorspill.engine.latencies import Latencies
from tensorspill.profiling.pictures.drawing import (
    note_below,
    painting,
    say_empty,
    shades,
    shortened,
    title,
)
from tensorspill.profiling.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["latency_tail"]

_SHARES = (50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 98.0, 99.0, 99.5, 99.8, 99.9, 99.95, 99.98, 99.99)
_TICKS = (50.0, 90.0, 99.0, 99.9, 99.99)
#: Where the slowest is drawn, behind four nines.
_MAX = 4.75


@dataclass(frozen=True, slots=True)
class _Tail:
    """Percentiles with their microseconds, and how many operations there were if that is known."""

    points: tuple[tuple[float, float], ...]
    slowest: float | None
    count: int | None


def latency_tail(
    curves: Mapping[str, Latencies | Row],
    axes: Axes | None = None,
    *,
    about: tuple[str, ...] = (),
) -> Figure:
    """Draw latencies of operations against the share that did not take longer.

    A curve is dotted where it rests on less than one operation: of a thousand operations nobody
    knows the slowest of ten thousand.

    Parameters
    ----------
    curves : mapping of str to Latencies or Row
        What to draw, by name. A row has three percentiles and the slowest.
    axes : matplotlib.axes.Axes, optional
        Where to; by default in a new figure.
    about : tuple of str
        What was measured, in words.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    tails = {name: _tail(curve) for name, curve in curves.items()}
    tails = {name: tail for name, tail in tails.items() if tail.points}
    with painting(axes, 6.8, 4.4) as (figure, axes):
        if not tails:
            say_empty(axes, "Latencies: none were measured")
            return figure
        for (name, tail), (colour, marker) in zip(tails.items(), shades(len(tails)), strict=True):
            _curve(axes, name, tail, colour, marker)
        _name_axes(axes, tails)
        title(axes, "D  latency of operations, and its tail", about)
        few = min((tail.count for tail in tails.values() if tail.count), default=None)
        if few is not None and few < 10_000:
            note_below(axes, f"dotted: beyond what {few:,} operations tell")
    return figure


def _tail(curve: Latencies | Row) -> _Tail:
    if isinstance(curve, Latencies):
        if not curve.count:
            return _Tail((), None, None)
        points = tuple((share, 1e6 * curve.percentile(share)) for share in _SHARES)
        return _Tail(points, None, curve.count)
    known = ((50.0, curve.lat_us_p50), (99.0, curve.lat_us_p99), (99.9, curve.lat_us_p999))
    points = tuple((share, us) for share, us in known if us)
    count = None
    if curve.total_bytes and curve.block_bytes:
        count = curve.rounds * -(-curve.total_bytes // curve.block_bytes)
    return _Tail(points, curve.lat_us_max, count)


def _nines(share: float) -> float:
    """Return where a percentile is drawn: each nine takes the same room."""
    return -math.log10(1 - share / 100)


def _told(share: float, count: int | None) -> bool:
    """Whether there was at least one operation beyond a percentile."""
    return count is None or count * (100 - share) >= 99.99


def _curve(axes: Axes, name: str, tail: _Tail, colour: Any, marker: str) -> None:
    sure = [(share, us) for share, us in tail.points if _told(share, tail.count)]
    rest = tail.points[max(0, len(sure) - 1) :]
    label = shortened(name, 34)
    for points, dashes, words in ((sure, "-", label), (rest, ":", "" if sure else label)):
        if len(points) > (1 if dashes == ":" and sure else 0):
            axes.plot(
                [_nines(share) for share, _ in points],
                [us for _, us in points],
                ls=dashes,
                color=colour,
                marker=marker,
                markersize=4.5,
                markerfacecolor=colour if dashes == "-" else "white",
                lw=1.6,
                label=words or "_",
            )
    if tail.slowest:
        axes.plot(
            [_MAX], [tail.slowest], marker=marker, ls="", color=colour, ms=6,
            markeredgecolor="black",
        )  # fmt: skip


def _name_axes(axes: Axes, tails: Mapping[str, _Tail]) -> None:
    import matplotlib.ticker as ticks

    slowest = any(tail.slowest for tail in tails.values())
    places = [_nines(share) for share in _TICKS] + ([_MAX] if slowest else [])
    names = [f"p{share:g}" for share in _TICKS] + (["max"] if slowest else [])
    axes.set_xticks(places, names)
    axes.set_xlim(_nines(50) - 0.1, places[-1] + 0.15)
    axes.set_yscale("log")
    values = [us for tail in tails.values() for _, us in tail.points]
    values += [tail.slowest for tail in tails.values() if tail.slowest]
    # Room above for the names of the curves.
    high = (max(values) / min(values)) ** (0.09 * len(tails))
    axes.set_ylim(min(values) / 1.5, max(values) * max(1.5 ** len(tails), high))
    axes.yaxis.set_major_locator(ticks.LogLocator(10, (1.0, 2.0, 5.0), numticks=12))
    axes.yaxis.set_major_formatter(ticks.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axes.yaxis.set_minor_formatter(ticks.NullFormatter())
    axes.set_xlabel("share of operations that took no longer (percentile)")
    axes.set_ylabel("latency (µs, log)")
    axes.grid(True, lw=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left")
