"""``tensorspill sweep``, ``tune`` and ``compare``."""

import dataclasses
import json
import re

import pytest

from tensorspill.cli import main
from tensorspill.opening import device_key, open_engine
from tensorspill.profiling.rows import header_line, lines_of, read_results
from tests.profiling.test_rows import ROW

GRID = ["--size", "1MiB", "--rounds", "1", "--direction", "read", "--depth", "1,4"]


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    folder = tmp_path / "folder"
    folder.mkdir()
    arguments = ["sweep", str(folder), *GRID, "--out", str(out), "--json"]
    assert main([*arguments, "--block", "64KiB"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert (first["points"], first["measured"]) == (2, 2)
    # As if the machine had gone down in the middle of the second row.
    text = out.read_text()
    out.write_text(text[: text.rindex('"cmd"')])
    assert main([*arguments, "--block", "64KiB,128KiB"]) == 0
    second = json.loads(capsys.readouterr().out)
    assert (second["points"], second["measured"]) == (4, 3)
    assert second["notes"] == []
    rows = read_results(out).rows
    assert rows[0].to_json() == first["rows"][0]
    assert {(row.block_bytes, row.depth) for row in rows} == {
        (block << 10, depth) for block in (64, 128) for depth in (1, 4)
    }
    assert len(read_results(tmp_path / "rows.csv").rows) == 4
    assert main([*arguments, "--block", "64KiB,128KiB,512KiB"]) == 0
    third = json.loads(capsys.readouterr().out)
    # Four operations of 512 KiB are more than all that is moved.
    assert (third["points"], third["measured"], third["left_out"]) == (5, 1, 1)
    assert list(folder.iterdir()) == []


def test_a_sweep_spoils_no_other_file(tmp_path, capsys):
    out = tmp_path / "notes.txt"
    out.write_text("remember the milk\n")
    assert main(["sweep", str(tmp_path), *GRID, "--block", "64KiB", "--out", str(out)]) == 3
    assert "No results" in capsys.readouterr().err
    assert out.read_text() == "remember the milk\n"


@pytest.mark.parametrize("as_json", [True, False])
def test_engines_use_what_was_tuned(as_json, tmp_path, capsys, monkeypatch):
    settings = tmp_path / "tuned.json"
    monkeypatch.setenv("TENSORSPILL_TUNED", str(settings))
    arguments = ["tune", str(tmp_path), "--size", "8MiB", "--seconds", "2"]
    assert main(arguments + ["--json"] * as_json) == 0
    said = capsys.readouterr().out
    if as_json:
        found = json.loads(said)
        assert found["file"] == str(settings)
        assert found["engine"] == "aio"
        block = found["deepspeed"]
        choice = {name: found["choice"][name] for name in ("block_bytes", "depth", "threads")}
    else:
        assert "\x1b" not in said
        shown = re.search(r"^\{.*^\}", said, re.MULTILINE | re.DOTALL)
        assert shown is not None
        block = json.loads(shown[0])
        choice = json.loads(settings.read_text())["devices"][device_key(tmp_path)]["aio"]
    assert block["aio"]["single_submit"] is False
    assert block["aio"]["overlap_events"] is True
    assert (block["aio"]["block_size"], block["aio"]["queue_depth"]) == (
        choice["block_bytes"],
        choice["depth"],
    )
    with open_engine(tmp_path) as engine:
        options = engine.statistics().options
    assert {name: options[name] for name in choice} == {
        name: (value, "tuned") for name, value in choice.items()
    }
    assert list(tmp_path.iterdir()) == [settings]


def test_a_dry_run_writes_no_settings(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("TENSORSPILL_TUNED", str(tmp_path / "tuned.json"))
    arguments = ["tune", str(tmp_path), "--size", "4MiB", "--seconds", "0.5", "--read", "1"]
    assert main([*arguments, "--dry-run", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["file"] is None
    assert {row["direction"] for row in found["rows"]} == {"read"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", [["--read", "2"], ["--seconds", "0"], ["--read", "nan"]])
def test_wrong_command_lines_of_tune(wrong, tmp_path):
    with pytest.raises(SystemExit) as ended:
        main(["tune", str(tmp_path), *wrong])
    assert ended.value.code == 2


def results(path, *rates, depth=32):
    row = dataclasses.replace(ROW, depth=depth, gbps_last_done=rates[0])
    path.write_text(header_line() + lines_of(row, rates))
    return str(path)


FAST, SLOW = (2.0, 2.1, 2.2, 2.05, 2.15), (1.0, 1.1, 1.2, 1.05, 1.15)


@pytest.mark.parametrize(("after", "status"), [(SLOW, 1), (FAST, 0), ((3.0, *FAST[1:]), 0)])
@pytest.mark.parametrize("as_json", [True, False])
def test_compare_says_by_its_status_what_is_slower(after, status, as_json, tmp_path, capsys):
    a, b = results(tmp_path / "a", *FAST), results(tmp_path / "b", *after)
    assert main(["compare", a, b] + ["--json"] * as_json) == status
    said = capsys.readouterr().out
    if as_json:
        assert (json.loads(said)["changes"][0]["verdict"] == "slower") == (status == 1)
    else:
        assert f"{status} slower" in said
        assert "\x1b" not in said


def test_compare_reads_what_is_cut_and_refuses_what_has_nothing_in_common(tmp_path, capsys):
    a, b = results(tmp_path / "a", *FAST), results(tmp_path / "b", *FAST, depth=1)
    assert main(["compare", a, b]) == 3
    assert "no measured point in common" in capsys.readouterr().err
    (tmp_path / "b").write_text((tmp_path / "a").read_text()[:-4])
    assert main(["compare", a, b]) == 0
    assert "cut short" in capsys.readouterr().out
    assert main(["compare", a, str(tmp_path / "missing")]) == 3


@pytest.mark.parametrize("command", ["bench", "sweep", "tune", "compare"])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0
    assert "--json" in capsys.readouterr().out
