"""Rows: JSON lines and CSV, from today, from older versions, cut short, damaged."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import MissingFileError, UnsupportedError
from tensorspill.profiling.rows import (
    COLUMNS,
    Row,
    header_line,
    lines_of,
    read_results,
    to_csv,
)

#: The columns that were agreed on, in this order.
AGREED = (
    "ts host commit engine path_taken direction gpu device fs numa block_bytes depth threads "
    "total_bytes rounds gbps_first_done gbps_last_done gbps_stdev lat_us_p50 lat_us_p99 "
    "lat_us_p999 lat_us_max cpu_pct pct_of_ceiling ceiling_name o_direct cache_dropped fsync "
    "verified cmd"
)

ROW = Row(
    ts="2026-01-02T03:04:05Z",
    host="node",
    commit="0.1.0",
    engine="aio",
    path_taken="direct",
    direction="read",
    device="nvme0n1",
    block_bytes=1 << 20,
    depth=32,
    threads=1,
    total_bytes=1 << 28,
    rounds=3,
    gbps_last_done=1.5,
    o_direct=True,
    verified=False,
    cmd="tensorspill bench /x --memory aligned --tensor 4KiB",
)

_TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc")), max_size=20)
_VALUES = {
    "str": _TEXT,
    "int": st.integers(0, 2**60),
    "float": st.floats(0, 1e9),
    "bool": st.booleans(),
}


@st.composite
def rows(draw):
    found = {}
    for field in dataclasses.fields(Row):
        kind = str(field.type)
        value = _VALUES[kind.removesuffix(" | None")]
        found[field.name] = draw(st.none() | value if kind.endswith("None") else value)
    found["engine"], found["direction"] = "aio", draw(st.sampled_from(["read", "write"]))
    return Row(**found)


def test_the_columns_are_those_that_were_agreed_on():
    assert " ".join(COLUMNS) == AGREED
    assert tuple(json.loads(lines_of(ROW))) == COLUMNS


@given(st.lists(rows(), max_size=4), st.lists(st.floats(0, 100), max_size=3))
def test_what_is_written_is_read(tmp_path_factory, written, rounds):
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(header_line() + "".join(lines_of(row, rounds) for row in written))
    found = read_results(path)
    assert found.rows == tuple(written)
    assert found.notes == ()
    assert all(each == pytest.approx(rounds, abs=1e-6) for each in found.rounds)
    path.write_text(to_csv(written))
    # CSV has one way to say nothing, for what is not known and for an empty text.
    assert [_known(row) for row in read_results(path).rows] == [_known(row) for row in written]


def _known(row):
    return {name: value for name, value in row.to_json().items() if value not in (None, "")}


@given(st.data())
def test_a_file_cut_anywhere_gives_the_rows_before_the_cut(tmp_path_factory, data):
    text = header_line() + lines_of(ROW, [1.0, 2.0]) + lines_of(ROW)
    cut = data.draw(st.integers(0, len(text)))
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text(text[:cut])
    ends = [text.index("}\n", text.index('"cmd"')), text.rindex("}")]
    if 0 < cut < text.index("\n"):
        with pytest.raises(UnsupportedError, match="No results"):
            read_results(path)
        return
    found = read_results(path)
    assert len(found.rows) == sum(cut > end for end in ends)
    assert all(row == ROW for row in found.rows)
    assert len(found.notes) <= 1


def test_older_newer_and_mixed_files(tmp_path):
    path = tmp_path / "rows.jsonl"
    old = {"engine": "aio", "direction": "read", "gbps_last_done": 2, "retired": 5}
    path.write_text(
        json.dumps({"form": "tensorspill-rows", "version": 99, "what": "else"})
        + "\n"
        + json.dumps(old)
        + "\n\n[1]\nnonsense\n"
        + json.dumps({"engine": "aio"})
        + "\n"
        + json.dumps({"engine": "aio", "direction": "read", "depth": "deep"})
        + "\n"
        + json.dumps({"engine": "aio", "direction": "read", "gbps_last_done": float("nan")})
        + "\n"
        + header_line()
        + lines_of(ROW)
    )
    found = read_results(path)
    assert [row.gbps_last_done for row in found.rows] == [2.0, 1.5]
    assert found.rows[0].measured
    assert found.rows[0].depth is None
    assert [note.split(": ")[0].rsplit(" ")[-1] for note in found.notes] == list("145678")


def test_a_cut_csv(tmp_path):
    path = tmp_path / "rows.csv"
    path.write_text(to_csv([ROW, ROW])[:-3])
    found = read_results(path)
    assert found.rows == (ROW,)
    assert "cut short" in found.notes[0]


@pytest.mark.parametrize("content", ["hello\n", "1\n", "{}\n", "\0\0\0", "a,b\n1,2\n"])
def test_what_is_no_results_file(content, tmp_path):
    path = tmp_path / "rows"
    path.write_text(content)
    with pytest.raises(UnsupportedError, match="No results"):
        read_results(path)
    with pytest.raises(MissingFileError):
        read_results(tmp_path / "missing")


def test_an_empty_file_has_no_rows(tmp_path):
    (tmp_path / "empty").write_text("")
    assert read_results(tmp_path / "empty").rows == ()


def test_labels():
    assert ROW.label == "1MiB x 32 in tensors of 4KiB aligned"
    assert ROW.argument("--absent") == ""
