"""Arranging requests in staging blocks."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.engine.batch import REQUEST
from tensorspill.host_fallback.device.arrange import PIECE, RUN, arrange, bound

GRANULE = 4096


def arranged(rows: np.ndarray, granules: list[int], block: int) -> tuple[np.ndarray, np.ndarray]:
    room = bound(rows, block, max(granules))
    pieces, runs = np.zeros(room, PIECE), np.zeros(room, RUN)
    n_pieces, n_runs = arrange(rows, np.array(granules, "i8"), block, pieces, runs)
    assert n_runs <= n_pieces <= room
    return pieces[:n_pieces], runs[:n_runs]


def requests(*rows: tuple[int, int, int, int]) -> np.ndarray:
    """Return a table of (address, bytes, offset, file)."""
    table = np.zeros(len(rows), REQUEST)
    for row, values in zip(table, rows, strict=True):
        row["addr"], row["nbytes"], row["offset"], row["file"] = values
    return table


#: Sizes, gaps before them in the file (0: they follow one another), and files.
batches = st.lists(
    st.tuples(
        st.one_of(st.integers(1, 300), st.integers(1, 40_000), st.just(GRANULE)),
        st.one_of(st.just(0), st.integers(0, 10_000), st.just(GRANULE)),
        st.integers(0, 1),
        st.integers(0, 10_000),
    ),
    min_size=1,
    max_size=30,
)


@given(batches, st.sampled_from([8192, 16384, 65536]), st.sampled_from([4096, 8192]))
def test_every_byte_once_and_where_it_belongs(batch, block, other_granule):
    ends, address, rows = [0, 0], 1 << 30, []
    for nbytes, gap, file, apart in batch:
        offset = ends[file] + gap
        rows.append((address, nbytes, offset, file))
        ends[file] = offset + nbytes
        address += nbytes + apart
    table, granules = requests(*rows), [GRANULE, other_granule]
    pieces, runs = arranged(table, granules, block)
    assert (np.diff(pieces["block"]) >= 0).all()
    assert int(pieces["nbytes"].sum()) == int(runs["nbytes"].sum()) == int(table["nbytes"].sum())

    # Where each byte of memory lies in the blocks, by its pieces, and in the file, by the runs.
    in_file = {}
    for run in runs:
        assert run["place"] + run["nbytes"] <= block
        assert (run["place"] - run["offset"]) % granules[run["file"]] == 0
        for i in range(0, int(run["nbytes"]), 97):
            key = (int(run["block"]), int(run["place"]) + i)
            assert key not in in_file
            in_file[key] = (int(run["file"]), int(run["offset"]) + i)
    taken = sorted((int(p["block"]), int(p["place"]), int(p["nbytes"])) for p in pieces)
    for (b1, p1, n1), (b2, p2, _) in itertools.pairwise(taken):
        assert b1 < b2 or p1 + n1 <= p2, "two pieces share a byte of a block"
    for (b, place), (file, offset) in in_file.items():
        piece = next(
            p for p in pieces if p["block"] == b and p["place"] <= place < p["place"] + p["nbytes"]
        )
        memory = int(piece["addr"]) + place - int(piece["place"])
        row = next(r for r in table if r["addr"] <= memory < r["addr"] + r["nbytes"])
        assert row["file"] == file
        assert int(row["offset"]) + memory - int(row["addr"]) == offset


def test_neighbours_in_the_file_are_one_run():
    rows = [(1 << 20 | i << 14, 1000, i * 1000, 0) for i in range(100)]
    pieces, runs = arranged(requests(*rows), [GRANULE], 1 << 20)
    assert len(pieces) == 100
    assert len(runs) == 1
    assert (runs[0]["place"], runs[0]["offset"], runs[0]["nbytes"]) == (0, 0, 100_000)


def test_requests_are_cut_between_granules_only():
    rows = [(7, 100_000, 1234, 0), (1 << 40, 100_000, 101_234, 0)]
    _, runs = arranged(requests(*rows), [GRANULE], 16384)
    assert all(run["offset"] % GRANULE == 0 for run in runs[1:])


def test_pieces_stay_in_their_requests():
    # Two allocations may be neighbours by chance; a copy over both is an error of the driver.
    rows = [(1 << 20, 4096, 0, 0), ((1 << 20) + 4096, 4096, 4096, 0)]
    pieces, runs = arranged(requests(*rows), [GRANULE], 1 << 20)
    assert (len(pieces), len(runs)) == (2, 1)


def test_two_thousand_small_tensors_fill_their_blocks():
    nbytes, block = 256 << 10, 4 << 20
    rows = [(i << 30 | 512, nbytes, i * nbytes, 0) for i in range(2000)]
    pieces, runs = arranged(requests(*rows), [GRANULE], block)
    assert int(pieces["block"][-1]) + 1 == len(runs) == 2000 * nbytes // block
    assert (runs["nbytes"] == block).all()
