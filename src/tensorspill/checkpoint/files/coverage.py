"""Whether the parts of a tensor cover it, each element once."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tensorspill.checkpoint.files.chunks import Box

__all__ = ["why_not_covered"]


def why_not_covered(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return what is wrong with the parts of a tensor, or None if nothing is."""
    if len(boxes) == 1 and boxes[0].lengths == tuple(shape) and not any(boxes[0].offsets):
        return None
    for box in boxes:
        if not box.inside(shape):
            return f"{box} is not inside of shape {tuple(shape)}"
    parts = [box for box in boxes if box.numel]
    covered = sum(box.numel for box in parts)
    if len(parts) > 1 and (pair := _overlap(parts)) is not None:
        return f"{pair[0]} and {pair[1]} overlap"
    if covered != math.prod(shape):
        return f"{covered} of {math.prod(shape)} elements are there"
    if not boxes:
        return "no part of it is there"
    return None


def _overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that share an element.

    Sorted by the dimension with the most different offsets, only near ones can overlap.
    """
    offsets = np.array([box.offsets for box in boxes], "i8").reshape(len(boxes), -1)
    ends = offsets + np.array([box.lengths for box in boxes], "i8").reshape(len(boxes), -1)
    if not offsets.shape[1]:
        return boxes[0], boxes[1]
    dim = max(range(offsets.shape[1]), key=lambda d: len(np.unique(offsets[:, d])))
    order = np.argsort(offsets[:, dim], kind="stable")
    low, high = offsets[order], ends[order]
    reach = np.maximum.accumulate(high[:, dim])
    for step in range(1, len(order)):
        if (low[step:, dim] >= reach[:-step]).all():
            return None
        both = ((low[step:] < high[:-step]) & (low[:-step] < high[step:])).all(axis=1)
        if both.any():
            first = int(np.argmax(both))
            return boxes[order[first]], boxes[order[first + step]]
    return None
