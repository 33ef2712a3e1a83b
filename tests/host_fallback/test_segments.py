"""The cutter: every byte of every request in exactly one segment, aligned as O_DIRECT needs it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.engine.batch import REQUEST
from tensorspill.host_fallback.layout import FILE, SEGMENT, Mode, Path
from tensorspill.host_fallback.segments import PACK_BELOW, cut

GRANULE, MEMORY = 4096, 512
BASE = 1 << 30


def cut_all(rows, *, direct=True, exclusive=False, pack_below=PACK_BELOW):
    requests = np.array(rows, REQUEST)
    files = np.array([(3 if direct else -1, 4, 4, 0, MEMORY, GRANULE, exclusive)], FILE)
    segments = np.zeros(3 * len(requests) + 1, SEGMENT)
    return requests, segments[: cut(requests, files, segments, pack_below)]


def paths(rows, **options):
    return [Path(s["path"]).name.lower() for s in cut_all(rows, **options)[1]]


def row(addr, nbytes, offset, write=1):
    return (BASE + addr, nbytes, offset, 0, write)


def test_an_aligned_request_goes_direct_whole():
    _, (segment,) = cut_all([row(0, 1 << 20, 8192)])
    assert segment["mode"] == Mode.DIRECT
    assert (segment["addr"], segment["offset"], segment["nbytes"]) == (BASE, 8192, 1 << 20)


def test_congruent_addresses_go_direct_between_edges():
    assert paths([row(64, 1 << 20, 64)], exclusive=True) == ["edge", "direct", "edge"]
    # A shared file's partial pages belong to the page cache when they are written.
    _, segments = cut_all([row(64, 1 << 20, 64)])
    assert [Mode(s["mode"]) for s in segments] == [Mode.BUFFERED, Mode.DIRECT, Mode.BUFFERED]
    assert segments["nbytes"].sum() == 1 << 20


def test_other_addresses_are_staged():
    assert paths([row(64, 1 << 20, 0)]) == ["staged"]
    assert paths([row(64, 1 << 20, 512)], exclusive=True) == ["staged"]


def test_small_neighbours_are_packed_and_strangers_are_not():
    rows = [row(i * 4096, 4096, i * 4096) for i in range(100)]
    assert paths(rows) == ["packed"]
    assert paths(rows, pack_below=0) == ["direct"] * 100
    apart = [row(i * 4096, 4096, i * 8192) for i in range(100)]
    assert paths(apart) == ["direct"] * 100
    mixed = [row(0, 4096, 0, 1), row(4096, 4096, 4096, 0)]
    assert paths(mixed) == ["direct", "direct"]


def test_padded_neighbours_are_packed_in_an_exclusive_file():
    rows = [row(i * 4096, 1000, i * 4096) for i in range(10)]
    assert paths(rows, exclusive=True) == ["packed"]
    # Elsewhere the gaps belong to somebody else.
    assert paths(rows) == ["edge"] * 10


def test_without_direct_io_all_is_buffered():
    assert paths([row(0, 1 << 20, 0), row(1 << 20, 10, 1 << 20)], direct=False) == ["buffered"] * 2


rows_strategy = st.lists(
    st.tuples(
        st.integers(0, 1 << 13),
        st.integers(1, 1 << 15),
        st.one_of(st.just(0), st.integers(0, 9000)),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=20,
)


@given(pieces=rows_strategy, exclusive=st.booleans(), packed=st.booleans())
@pytest.mark.parametrize("direct", [True, False])
def test_every_byte_is_in_exactly_one_segment(direct, pieces, exclusive, packed):
    rows, end, addr = [], 0, 0
    for shift, nbytes, gap, write in pieces:
        offset = end + gap
        if exclusive:
            offset = -(-offset // GRANULE) * GRANULE
        rows.append(row(addr + shift, nbytes, offset, write))
        end, addr = offset + nbytes, addr + shift + nbytes
    requests, segments = cut_all(
        rows, direct=direct, exclusive=exclusive, pack_below=PACK_BELOW if packed else 0
    )
    covered = np.zeros((len(rows), max(nbytes for _, nbytes, _, _ in pieces)), int)
    for segment in segments:
        _check_alignment(segment)
        stop = min(segment["offset"] + segment["nbytes"], segment["useful"])
        for i in range(segment["first"], segment["last"] + 1):
            request = requests[i]
            assert segment["write"] == request["write"]
            low = max(segment["offset"], request["offset"])
            high = min(stop, request["offset"] + request["nbytes"])
            if high > low:
                covered[i, low - request["offset"] : high - request["offset"]] += 1
            if segment["mode"] != Mode.STAGED:
                assert segment["addr"] - segment["offset"] == request["addr"] - request["offset"]
        if segment["write"] and not exclusive:
            _check_owned(segment, requests)
    for i, (_, nbytes, _, _) in enumerate(pieces):
        assert (covered[i, :nbytes] == 1).all()


def _check_alignment(segment):
    if segment["mode"] == Mode.BUFFERED:
        return
    assert segment["offset"] % GRANULE == 0
    assert segment["nbytes"] % GRANULE == 0
    if segment["mode"] == Mode.DIRECT:
        assert segment["addr"] % MEMORY == 0


def _check_owned(segment, requests):
    """A write to a shared file touches only bytes that its requests own."""
    owned = sum(
        max(
            0,
            min(r["offset"] + r["nbytes"], segment["offset"] + segment["nbytes"])
            - max(r["offset"], segment["offset"]),
        )
        for r in requests[segment["first"] : segment["last"] + 1]
    )
    assert owned == segment["nbytes"]
