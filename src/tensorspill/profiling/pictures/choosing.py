"""Which of many rows belong into one picture, and what of them is told beside it."""

from __future__ import annotations

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

from tensorspill.profiling.ceilings import Ceiling
from tensorspill.profiling.points import size_text
from tensorspill.profiling.rows import Row
from tensorspill.profiling.tune import ENOUGH

__all__ = [
    "OTHERS",
    "Cell",
    "alike",
    "cells",
    "derived_ceilings",
    "described",
    "directions",
    "ours",
    "smallest",
]

#: Programs that are compared with.
OTHERS = frozenset(("fio", "gdsio", "nvbandwidth"))

#: What may differ between the points of one picture.
_VARIED = frozenset(("--block", "--depth", "--size", "--rounds"))

Cell = tuple[int, int]


def ours(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of our engines that have figures, a block and a depth."""
    return [
        row
        for row in rows
        if row.measured and row.engine not in OTHERS and row.block_bytes and row.depth
    ]


def directions(rows: Iterable[Row]) -> tuple[str, ...]:
    """Return the directions that were measured, reads first."""
    found = {row.direction for row in ours(rows)}
    return tuple(sorted(found, key=lambda name: (name != "read", name)))


def alike(rows: Iterable[Row], direction: str | None = None) -> tuple[Row, ...]:
    """Return the most rows that differ in block and depth alone.

    Parameters
    ----------
    rows : iterable of Row
        All sorts of rows; those without figures and of other programs are left out.
    direction : {"read", "write"}, optional
        By default that of which there are more rows; reads if both have as many.
    """
    groups: defaultdict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in ours(rows):
        if direction in (None, row.direction):
            groups[_kind(row)].append(row)

    def size(group: list[Row]) -> tuple[int, bool, int]:
        settings = {(row.block_bytes, row.depth) for row in group}
        return len(settings), group[0].direction == "read", len(group)

    most: list[Row] = max(groups.values(), key=size, default=[])
    return tuple(most)


def _kind(row: Row) -> tuple[object, ...]:
    """Return what is the same for all points of a picture, the command's other options included."""
    place = row.host, row.device, row.fs, row.gpu, row.numa
    return row.engine, row.direction, row.threads, *place, _options(row.cmd)


def _options(cmd: str) -> tuple[str, ...]:
    try:
        words = shlex.split(cmd)
    except ValueError:
        return (cmd,)
    return tuple(
        word
        for before, word in zip(["", *words], words, strict=False)
        if word not in _VARIED and before not in _VARIED
    )


def cells(rows: Iterable[Row]) -> dict[Cell, tuple[float, float]]:
    """Return median and spread of the rate of each block and depth, in GB/s.

    The spread of one that was measured once is that of its rounds.
    """
    found = defaultdict(list)
    for row in rows:
        if row.block_bytes and row.depth and row.gbps_last_done is not None:
            found[row.block_bytes, row.depth].append(row)
    return {cell: _middle(group) for cell, group in found.items()}


def _middle(group: Sequence[Row]) -> tuple[float, float]:
    rates = [row.gbps_last_done or 0.0 for row in group]
    spread = statistics.stdev(rates) if len(rates) > 1 else group[0].gbps_stdev or 0.0
    return statistics.median(rates), spread


def smallest(rates: dict[Cell, tuple[float, float]]) -> Cell | None:
    """Return the block and depth with the fewest bytes in flight within 95 % of the best rate."""
    best = max((rate for rate, _ in rates.values()), default=0.0)
    enough = [cell for cell, (rate, _) in rates.items() if rate >= ENOUGH * best]
    return min(enough, key=lambda cell: (cell[0] * cell[1], cell[1]), default=None)


def described(rows: Sequence[Row]) -> list[str]:
    """Return in words what the rows of one picture have in common, the most important first."""
    if not rows:
        return []
    row = rows[0]
    where = " on ".join(name for name in (row.fs, row.device) if name)
    rounds = sorted({row.rounds for row in rows})
    times = f"{rounds[0]}" if rounds[0] == rounds[-1] else f"{rounds[0]} to {rounds[-1]}"
    words = [
        row.engine,
        row.gpu or "host memory",
        where,
        f"{row.threads} threads" if row.threads and row.threads > 1 else "",
        "" if rounds[-1] == 0 else f"{times} round{'' if rounds[-1] == 1 else 's'}",
        row.host,
    ]
    if any(row.cache_dropped is False for row in rows):
        words.insert(3, "page cache not dropped")
    if not all(row.verified for row in rows):
        words.insert(3, "not verified")
    return [word for word in words if word]


def derived_ceilings(rows: Iterable[Row], direction: str) -> tuple[Ceiling, ...]:
    """Return the limits that rows tell of: those in per cent of which they are, and fio's rates.

    What a results file does not hold can't be here: of each row it names the tightest one only.
    """
    found = defaultdict(list)
    measured = []
    for row in rows:
        if row.direction != direction or not row.gbps_last_done:
            continue
        if row.engine == "fio" and row.block_bytes and row.depth:
            name = f"fio {row.direction} {size_text(row.block_bytes)} x {row.depth}"
            measured.append((name, row.gbps_last_done))
        elif row.pct_of_ceiling and row.ceiling_name:
            found[row.ceiling_name].append(100 * row.gbps_last_done / row.pct_of_ceiling)
    limits = [Ceiling(name, statistics.median(rates), _why(name)) for name, rates in found.items()]
    known = [limit.name for limit in limits]
    limits += [
        Ceiling(name, rate, "measured")
        for name, rate in measured
        if not any(other.startswith(name) for other in known)
    ]
    return tuple(sorted(limits, key=lambda limit: limit.gbps or 0.0))


def _why(name: str) -> str:
    return "measured" if name.startswith(("fio ", "host copy")) else "as the rows say"
