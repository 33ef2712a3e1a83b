"""What a run of points gave, as one picture of several panels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tensorspill.profiling.ceilings import Ceiling
from tensorspill.profiling.pictures.bars import limits
from tensorspill.profiling.pictures.choosing import alike, described, directions
from tensorspill.profiling.pictures.drawing import binary, keep_inside, look, new_figure, save
from tensorspill.profiling.pictures.heat import heat_map
from tensorspill.profiling.pictures.roof import roofline
from tensorspill.profiling.pictures.tail import latency_tail
from tensorspill.profiling.rows import Results, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_results", "overview", "tails"]

#: Curves of latencies that can still be told apart.
_CURVES = 6


def overview(
    results: Results, *, ceilings: Mapping[str, Sequence[Ceiling]] | None = None
) -> Figure:
    """Draw panels A to D, a column for each direction that was measured.

    Parameters
    ----------
    results : Results
    ceilings : mapping of str to sequence of Ceiling, optional
        By direction; by default those that the rows tell of.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    """
    ways = directions(results.rows) or ("read",)
    known = ceilings or {}
    with look():
        figure = new_figure(7.4 * len(ways), 17.0, layout="constrained")
        # Each panel is laid out on its own: long names beside one don't narrow the others.
        parts = figure.subfigures(4, len(ways), squeeze=False)
        for column, way in enumerate(ways):
            heat, roof, bars, tail = (part.add_subplot() for part in parts[:, column])
            heat_map(results.rows, heat, direction=way)
            roofline(results.rows, roof, direction=way, ceilings=known.get(way))
            limits(results.rows, bars, direction=way, ceilings=known.get(way))
            curves, about = tails(results.rows, way)
            latency_tail(curves, tail, about=about)
        keep_inside(figure)
    return figure


def tails(rows: Sequence[Row], direction: str) -> tuple[dict[str, Row], tuple[str, ...]]:
    """Return for panel D the fastest row of each block by name, and what they have in common."""
    shown = [row for row in alike(rows, direction) if row.lat_us_p50]
    best: dict[int, Row] = {}
    for row in sorted(shown, key=lambda row: row.gbps_last_done or 0.0):
        best[row.block_bytes or 0] = row
    chosen = [best[block] for block in sorted(best)]
    step = max(1, -(-len(chosen) // _CURVES))
    named = {
        f"{binary(row.block_bytes or 0)} x {row.depth}": row for row in reversed(chosen[::-step])
    }
    return named, (direction, "the fastest depth of each block", *described(shown))


def draw_results(
    results: Results,
    path: str,
    *,
    ceilings: Mapping[str, Sequence[Ceiling]] | None = None,
) -> None:
    """Draw `overview` into a PNG file.

    Raises
    ------
    UnsupportedError
        matplotlib is not installed.
    BrokenError
        The file can't be written.
    """
    save(overview(results, ceilings=ceilings), path, "png")
