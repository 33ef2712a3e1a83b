"""``tensorspill plan``: its JSON, its text, and what it says about wrong questions."""

import json

import pytest

from tensorspill.cli import main

SMALL = ["plan", "--machine", "dgx-h100", "--nodes", "4", "--tp", "8", "--pp", "2"]
LAYOUT = {
    "ranks": ["a", "a", "b", "b"],
    "slices": [
        {"name": "shared", "replicas": [0, 1, 2, 3], "nbytes": 10**9},
        {
            "name": "tensors",
            "replicas": [0, 2],
            "atoms": [{"name": "w", "rows": 1000, "row_bytes": 4096}],
        },
    ],
}


def as_json(capsys, arguments):
    assert main([*arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_json_has_the_figures(capsys) -> None:
    found = as_json(capsys, SMALL)
    assert found["makespan_s"] >= found["lower_bound_s"] > 0
    assert found["makespan_s"] <= 1.01 * found["lower_bound_s"]
    assert found["planning_s"] > 0
    assert len(found["digest"]) == 32
    assert sum(writer["nbytes"] for writer in found["writers"]) == found["nbytes"]
    assert set(found["alternatives"]) == {"first-replica", "equal-split", "one-per-machine"}
    for other in found["alternatives"].values():
        assert other["makespan_s"] >= other["lower_bound_s"] == found["lower_bound_s"]
    assert as_json(capsys, SMALL)["digest"] == found["digest"]


def test_explains_a_rank(capsys) -> None:
    found = as_json(capsys, [*SMALL, "--explain", "9"])["explain"]
    assert found["rank"] == 9
    assert sum(piece["stop"] - piece["start"] for piece in found["pieces"]) == found["nbytes"]
    assert "dgx-h100-1/drives" in found["reason"]
    assert max(found["busy"], key=found["busy"].get) == "dgx-h100-1/drives"
    assert main([*SMALL, "--explain", "9"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "rank 9 writes" in text
    assert "set the bound T*" in text


def test_explains_those_who_write_nothing(capsys) -> None:
    found = as_json(capsys, [*SMALL, "--unit", "none", "--explain", "31"])["explain"]
    assert found["nbytes"] == 0
    assert "unit is none" in found["reason"]
    excluded = [*SMALL, "--exclude", "dgx-h100-3", "--explain", "31"]
    assert "excluded" in as_json(capsys, excluded)["explain"]["reason"]


@pytest.mark.parametrize("width", ["40", "60", "100"])
def test_text_fits_the_terminal(capsys, monkeypatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert main([*SMALL, "--zero", "1", "--exclude", "dgx-h100-1/drives"]) == 3
    assert "dgx-h100-1/drives, which is excluded" in capsys.readouterr().err
    assert main([*SMALL, "--exclude", "dgx-h100-1/drives"]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= int(width)
    for word in ("this plan", "first-replica", "storage", "(exc", "digest"):
        assert word in out


def test_layout_file(capsys, tmp_path) -> None:
    file = tmp_path / "layout.json"
    file.write_text(json.dumps(LAYOUT))
    found = as_json(capsys, ["plan", str(file)])
    assert found["ranks"] == 4
    assert found["machines"] == 2
    assert found["nbytes"] == 10**9 + 4096 * 1000
    halved = as_json(capsys, ["plan", str(file), "--exclude", "a"])
    assert {writer["rank"] for writer in halved["writers"]} == {2, 3}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"colour": 1}, "no field 'colour'"),
        ({"tp": "8"}, "tp is '8'"),
        ({"ranks": {}}, "no list of ranks"),
        ({"slices": 3}, "not a list"),
        ({"slices": [{"name": "x"}]}, "is no slice"),
        ({"slices": [{"name": "x", "replicas": [0]}]}, "neither nbytes nor atoms"),
        ({"slices": [{"name": "x", "replicas": [9], "nbytes": 1}]}, "rank 9"),
        ({"slices": [{"name": "x", "replicas": ["0"], "nbytes": 1}]}, "whole numbers"),
        ({"slices": [{"name": "x", "replicas": [0, 0], "nbytes": 1}]}, "a replica twice"),
        ({"slices": [{"name": "x", "replicas": [0], "nbytes": -1}]}, "negative"),
        ({"capacities": {"stream": 0}}, "capacity of a stream is 0"),
        ({"capacities": {"tape": 1}}, "capacities is"),
        ({"storage": "tape"}, "Storage 'tape'"),
        ({"unit": "rack"}, "rack"),
    ],
)
def test_bad_layouts_are_named(capsys, tmp_path, change, named) -> None:
    file = tmp_path / "layout.json"
    file.write_text(json.dumps({**LAYOUT, **change}))
    assert main(["plan", str(file)]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--machine", "abacus"], "abacus"),
        (["--nodes", "4", "--tp", "3"], "tp 3 does not divide 32"),
        (["--nodes", "4", "--tp", "8", "--dp", "3"], "24 ranks, but the machines have 32"),
        (["--nodes", "1", "--explain", "8"], "no rank 8 of 8"),
        (["--nodes", "1", "--dp", "8", "--copies", "2"], "in only 1 domains"),
        (["missing.json"], "missing.json"),
    ],
)
def test_wrong_questions_are_named(capsys, arguments, named) -> None:
    assert main(["plan", *arguments]) == 3
    captured = capsys.readouterr()
    assert captured.out == ""
    assert named in captured.err


def test_numbers_with_units(capsys) -> None:
    plain = as_json(capsys, [*SMALL, "--params", "1500000000"])
    assert as_json(capsys, [*SMALL, "--params", "1.5B"])["digest"] == plain["digest"]
    with pytest.raises(SystemExit):
        main([*SMALL, "--params", "many"])
