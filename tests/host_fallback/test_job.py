import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.engine.batch import REQUEST
from tensorspill.host_fallback.job import split

BLOCK = 8192


@given(
    sizes=st.lists(st.integers(0, 100_000), min_size=1, max_size=30),
    parts=st.integers(1, 6),
    start=st.integers(0, 10_000),
)
def test_splitting_keeps_every_byte_once_and_in_order(sizes, parts, start):
    ends = start + np.cumsum(sizes)
    requests = np.zeros(len(sizes), REQUEST)
    requests["nbytes"] = sizes
    requests["offset"] = ends - sizes
    requests["addr"] = 1_000_000 + requests["offset"]
    tables = split(requests, parts, BLOCK)
    assert len(tables) <= parts
    flat = np.concatenate(tables) if tables else requests[:0]
    assert int(flat["nbytes"].sum()) == sum(sizes)
    assert (flat["addr"] - flat["offset"] == 1_000_000).all()
    position = start
    for piece in flat:
        assert piece["offset"] == position
        assert piece["nbytes"] > 0
        position += int(piece["nbytes"])
        # A cut inside a request is at a block, so that two workers never share a page.
        assert position % BLOCK == 0 or position in ends
