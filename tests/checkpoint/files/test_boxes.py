"""Boxes, their coverage, and moving ranges of elements."""

import itertools

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.checkpoint.files.chunks import Box, element_boxes
from tensorspill.checkpoint.files.coverage import why_not_covered
from tensorspill.checkpoint.files.digesting import Digests
from tensorspill.checkpoint.files.moving import gather, scatter
from tensorspill.pool import digest

shapes = st.lists(st.integers(1, 7), max_size=4).map(tuple)


@st.composite
def grids(draw):
    """Draw a shape and a grid of boxes that covers it."""
    shape = draw(shapes)
    boxes = [Box((), ())]
    for size in shape:
        cuts = sorted(draw(st.sets(st.integers(1, size), max_size=3)) | {0, size})
        boxes = [
            Box((*box.offsets, a), (*box.lengths, b - a))
            for box in boxes
            for a, b in itertools.pairwise(cuts)
        ]
    return shape, draw(st.permutations(boxes))


@given(grids())
def test_a_grid_covers(grid):
    assert why_not_covered(*grid) is None


@given(grids(), st.data())
def test_what_is_missing_or_twice_is_found(grid, data):
    shape, boxes = grid
    which = data.draw(st.integers(0, len(boxes) - 1))
    assert why_not_covered(shape, boxes[:which] + boxes[which + 1 :]) is not None
    assert why_not_covered(shape, [*boxes, boxes[which]]) is not None


@given(grids(), st.data())
def test_what_is_moved_or_stretched_is_found(grid, data):
    shape, boxes = grid
    if not shape:
        return
    which, dim = (
        data.draw(st.integers(0, len(boxes) - 1)),
        data.draw(st.integers(0, len(shape) - 1)),
    )
    field, change = data.draw(st.integers(0, 1)), data.draw(st.sampled_from([-1, 1]))
    changed = [list(boxes[which].offsets), list(boxes[which].lengths)]
    changed[field][dim] += change
    other = [*boxes[:which], Box(*map(tuple, changed)), *boxes[which + 1 :]]
    assert why_not_covered(shape, other) is not None


@given(shapes, st.data())
def test_element_boxes_are_the_elements_in_order(shape, data):
    count = int(np.prod(shape))
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    values = torch.arange(count).view(shape)
    boxes = list(element_boxes(shape, start, stop))
    found = [value for box in boxes for value in box.of(values).reshape(-1).tolist()]
    assert found == list(range(start, stop))
    assert len(boxes) <= 2 * max(len(shape), 1)


@given(shapes, st.data())
def test_gather_and_scatter_undo_each_other(shape, data):
    order = data.draw(st.permutations(range(len(shape))))
    count = int(np.prod(shape))
    values = torch.arange(count).view(shape).permute(order)
    flat = torch.full((count,), -1)
    step = data.draw(st.integers(1, count))
    for start in range(0, count, step):
        gather(values, start, flat[start : start + step])
    assert flat.tolist() == values.reshape(-1).tolist()
    box = Box.whole(values.shape)
    back = torch.full(shape, -1).permute(order)
    for start in range(0, count, step):
        scatter(flat[start : start + step], start, tuple(values.shape), box, back)
    assert torch.equal(back, values)


@given(st.lists(st.integers(0, 200_000), min_size=1, max_size=5))
def test_digests_in_one_call_are_those_of_the_pool(sizes):
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
    offsets = np.concatenate([[0], np.cumsum(sizes)]).tolist()
    digests = Digests(sizes, offsets[:-1])
    digests.in_memory(0, [tensor.data_ptr() for tensor in data])
    for position in (offsets[-1] // 2, offsets[-1]):
        digests.compute(position)
    for tensor, span, found in zip(
        data, digests.spans, digests.of_chunks(0, len(sizes)), strict=True
    ):
        expected = [digest(tensor[i : i + span]) for i in range(0, tensor.numel(), span)]
        assert np.frombuffer(found, "<u8").tolist() == expected
