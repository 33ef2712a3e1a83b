"""Places for labels beside an axis, so that none covers another."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["apart"]


def apart(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return places that are at least `gap` apart, as near as can be to those wanted.

    Parameters
    ----------
    wanted : sequence of float
        In any order; the order is kept.
    gap : float
        Least distance of two. If there is no room for it between `low` and `high`, the places are
        even over all of it.
    """
    count = len(wanted)
    if count == 0:
        return []
    if gap * (count - 1) >= high - low:
        gap = (high - low) / max(1, count - 1)
    order = sorted(range(count), key=lambda number: wanted[number])
    # Without the gaps it is the nearest sequence that does not fall: neighbours that would are
    # joined to one at their mean.
    groups: list[tuple[float, int]] = []
    for place, number in enumerate(order):
        mean, size = min(max(wanted[number], low), high) - gap * place, 1
        while groups and groups[-1][0] >= mean:
            other, others = groups.pop()
            mean, size = (mean * size + other * others) / (size + others), size + others
        groups.append((mean, size))
    flat = [mean for mean, size in groups for _ in range(size)]
    last = high - gap * (count - 1)
    found = [0.0] * count
    for place, number in enumerate(order):
        found[number] = min(max(flat[place], low), max(low, last)) + gap * place
    return found
