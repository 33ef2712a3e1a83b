"""Measuring one point for a while: whether its rate holds, and the tail of its latencies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from tensorspill.profiling.ceilings import Ceiling
from tensorspill.profiling.measuring import Measuring
from tensorspill.profiling.points import Point
from tensorspill.profiling.rows import Row
from tensorspill.profiling.site import Site

__all__ = ["measure_steadily"]


def measure_steadily(
    site: Site,
    point: Point,
    seconds: float,
    tick: Callable[[float, float, str], None] = lambda _done, _total, _text: None,
    ceilings: Iterable[Ceiling] = (),
) -> tuple[Row, tuple[float, ...]]:
    """Measure a point again and again, and return its row and the GB/s of each round.

    Parameters
    ----------
    site : Site
    point : Point
    seconds : float
        For how long, comparing of the bytes between rounds included; at least two rounds.
    tick : callable
        Told how many seconds are done, of how many, and what is measured.
    ceilings : iterable of Ceiling
        Known limits.

    Raises
    ------
    CorruptError
        Bytes were not what they should be.
    SpillError
        A transfer failed.
    """
    with Measuring(site, point) as measuring:
        begun = time.perf_counter()
        over = False
        while not over:
            spent = time.perf_counter() - begun
            tick(min(spent, seconds), seconds, point.label)
            over = spent >= seconds and len(measuring.rounds) > 0
            measuring.round(last=over)
        tick(seconds, seconds, "done")
        return measuring.row(ceilings), tuple(done.gbps for done in measuring.rounds)
