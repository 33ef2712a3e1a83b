"""Ranges in use by live transfers."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.pool.live import LiveRanges

RANGES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 10)), max_size=5)


@given(batches=st.lists(RANGES, max_size=4), probe=st.tuples(st.integers(0, 60), st.integers(0, 9)))
def test_overlap_is_sharing_a_byte(
    batches: list[list[tuple[int, int]]], probe: tuple[int, int]
) -> None:
    ranges = LiveRanges()
    tokens = [ranges.add(*np.array(batch, np.int64).reshape(-1, 2).T) for batch in batches]
    used = {
        byte for batch in batches for start, size in batch for byte in range(start, start + size)
    }
    start, size = probe
    assert ranges.overlap(start, size) == bool(used & set(range(start, start + size)))
    for token in [*tokens, 12345]:
        ranges.remove(token)
    assert not ranges.overlap(0, 1000)
