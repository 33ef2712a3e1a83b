"""Cutting keeps every byte, and no two operations share a page that cuFile writes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.engine.batch import REQUEST
from tensorspill.gds.cutting import cut, join
from tensorspill.gds.options import PAGE
from tensorspill.gds.paths import Path, classify, sums

near = st.builds(
    lambda pages, delta: max(0, pages * PAGE + delta), st.integers(0, 40), st.integers(-2, 2)
)
ranges = st.lists(st.tuples(near, near.map(lambda n: n + 1), st.booleans()), min_size=1, max_size=8)


def table_of(rows) -> np.ndarray:
    """Lay ranges one behind another in a file: (gap, bytes, whether it is written)."""
    table = np.zeros(len(rows), REQUEST)
    end = 0
    for row, (gap, nbytes, write) in zip(table, rows, strict=True):
        row["offset"], row["nbytes"], row["write"] = end + gap, nbytes, write
        row["addr"] = (1 << 40) + row["offset"]
        end += gap + nbytes
    return table


@given(rows=ranges, pages=st.integers(1, 8))
def test_every_byte_once(rows, pages):
    table, block = table_of(rows), pages * PAGE
    operations, origin = cut(table, block)
    assert (operations["nbytes"] > 0).all()
    assert (operations["nbytes"] < 2 * block + PAGE).all()
    for number, row in enumerate(table):
        mine = operations[origin == number]
        assert mine["offset"][0] == row["offset"]
        assert (mine["offset"][1:] == mine["offset"][:-1] + mine["nbytes"][:-1]).all()
        assert mine["offset"][-1] + mine["nbytes"][-1] == row["offset"] + row["nbytes"]
        assert (mine["addr"] - row["addr"] == mine["offset"] - row["offset"]).all()
        assert (mine["write"] == row["write"]).all()
        assert (mine["offset"][1:] % PAGE == 0).all()


@given(rows=ranges, pages=st.integers(1, 8))
def test_what_cufile_writes_is_whole_pages(rows, pages):
    operations, _ = cut(table_of(rows), pages * PAGE)
    odd = (operations["offset"] % PAGE != 0) | (operations["nbytes"] % PAGE != 0)
    assert (operations["nbytes"][odd & (operations["write"] != 0)] < 2 * PAGE).all()


@given(rows=ranges, split=st.integers(0, 8))
def test_joining(rows, split):
    table = table_of(rows)
    allocation = (np.arange(len(table)) >= split).astype("i8")
    joined, of = join(table, allocation)
    assert joined["nbytes"].sum() == table["nbytes"].sum()
    apart = 1
    for i in range(1, len(table)):
        gap, same = rows[i][0], rows[i][2] == rows[i - 1][2] and allocation[i] == allocation[i - 1]
        apart += not (gap == 0 and same)
    assert len(joined) == len(of) == apart


def test_paths_and_sums():
    table = table_of([(0, 8 * PAGE, True), (0, 8 * PAGE, True), (0, 5 * PAGE + 3, True), (5, 7, 1)])
    compat = np.array([False, False, False, True])
    registered = np.array([True, False, True, True])
    path = classify(table, compat, registered, 4 * PAGE)
    assert path.tolist() == [Path.DIRECT, Path.BOUNCE, Path.BOUNCE, Path.COMPAT]
    begun, ended = np.array([0.0, 1.0, 1.5, 9.0]), np.array([1.0, 2.0, 4.0, 9.5])
    found = sums(table, path, begun, ended, np.array([True, True, True, False]))
    assert set(found) == {"direct", "bounce"}
    assert (found["bounce"].operations, found["bounce"].seconds) == (2, 3.0)
    assert (found["bounce"].slowest, found["bounce"].nbytes) == (2.5, 13 * PAGE + 3)
    assert found["bounce"].io_bytes == 14 * PAGE
