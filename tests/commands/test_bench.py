"""``tensorspill bench``: JSON, terminals, folders that won't do, runs that are ended."""

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import time

import pytest
from rich.console import Console

from tensorspill.cli import main
from tensorspill.commands.bench_text import show
from tensorspill.commands.measured_text import show_rows
from tensorspill.profiling.bench import Bench, Comparison
from tensorspill.profiling.points import Point
from tensorspill.profiling.rows import COLUMNS, Row, read_results
from tensorspill.profiling.site import Site
from tests.faults import another_user, small_file_system

COMMAND = [sys.executable, "-m", "tensorspill.cli", "bench"]
SMALL = ["--size", "2MiB", "--rounds", "1", "--block", "256KiB", "--depth", "4"]


def test_json_is_one_value_and_files_hold_the_same_rows(tmp_path, capsys):
    folder, out, table = tmp_path / "folder", tmp_path / "rows.jsonl", tmp_path / "rows.csv"
    folder.mkdir()
    arguments = ["bench", str(folder), *SMALL, "--json", "--out", str(out), "--csv", str(table)]
    assert main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    assert said.out.count("\n") == 1
    found = json.loads(said.out)
    assert [row["direction"] for row in found["rows"]] == ["read", "write"]
    assert all(tuple(row) == COLUMNS for row in found["rows"])
    rows = [Row.from_json(row) for row in found["rows"]]
    assert list(read_results(out).rows) == rows
    assert read_results(out).rounds == tuple(
        pytest.approx(each, abs=1e-6) for each in found["round_gbps"]
    )
    assert len(read_results(table).rows) == 2
    assert list(folder.iterdir()) == []
    # A second run adds to what is there.
    assert main([*arguments, "--direction", "read"]) == 0
    assert len(read_results(out).rows) == 3


def test_the_command_of_a_row_measures_it_again(tmp_path, capsys):
    assert main(["bench", str(tmp_path), *SMALL, "--direction", "write", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)["rows"][0]
    assert main([*row["cmd"].split()[1:], "--json"]) == 0
    (again,) = json.loads(capsys.readouterr().out)["rows"]
    same = ("direction", "block_bytes", "depth", "threads", "total_bytes", "rounds", "cmd")
    assert {name: again[name] for name in same} == {name: row[name] for name in same}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    with Site(tmp_path_factory.mktemp("site"), 2 << 20) as site:
        bench = Bench(site, 1)
        bench.run([Point(direction="read", total_bytes=2 << 20)])
        bench.measure(Point(direction="read", total_bytes=2 << 20, device="cuda:66"))
        bench.comparisons.append(Comparison("read \x1b[31m", why="fio is not [bold]installed"))
        return bench


@pytest.mark.parametrize("width", [20, 40, 89, 90, 120, 200])
def test_nothing_is_wider_than_the_terminal_nor_lost(width, found):
    file = io.StringIO()
    show(found, found.site, Console(file=file, width=width, highlight=False))
    said = file.getvalue()
    assert max(map(len, said.splitlines())) <= width
    assert "\x1b" not in said
    squeezed = re.sub(r"\s", "", said)
    for word in ("GB/s", "direct", "notmeasured", "cuda:66", "Limits", "not[bold]installed"):
        assert word in squeezed


def test_no_rows_are_no_table():
    file = io.StringIO()
    show_rows(Console(file=file), [])
    assert file.getvalue() == ""


def run(*arguments, **more):
    return subprocess.run(
        [*COMMAND, *map(str, arguments)], capture_output=True, text=True, timeout=120, **more
    )


def test_output_that_is_piped_has_no_escapes_and_is_not_cut(tmp_path):
    done = run(tmp_path, *SMALL, env=os.environ | {"COLUMNS": "30"})
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    assert "256KiB x 4 aligned" in done.stdout


@pytest.mark.parametrize(
    ("term", "columns"), [("dumb", 120), pytest.param("xterm", 24, marks=pytest.mark.thorough)]
)
def test_terminals(tmp_path, term, columns):
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {n: v for n, v in os.environ.items() if n not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path), *SMALL],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=environment | {"TERM": term, "NO_COLOR": "1"},
    )
    os.close(theirs)
    said = b""
    with contextlib.suppress(OSError):  # what a terminal answers when nobody holds its other end
        while part := os.read(ours, 4096):
            said += part
    os.close(ours)
    assert process.wait(60) == 0
    text = said.decode()
    assert "GB/s" in text
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", text)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_may_not_be_written(capsys):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o555)
        with another_user():
            if os.access(folder, os.W_OK, effective_ids=True):
                pytest.skip("this user may write everywhere")
            assert main(["bench", folder, *SMALL]) == 3
        said = capsys.readouterr()
        assert said.out == ""
        assert "Use a folder that this user may write to" in said.err
        assert os.listdir(folder) == []


def test_a_read_only_file_system(tmp_path, capsys):
    with small_file_system(tmp_path, 16 << 20) as folder:
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        assert main(["bench", str(folder), *SMALL]) == 3
        assert "mounted read-only" in capsys.readouterr().err


@pytest.mark.parametrize("where", ["missing", "file"])
def test_what_is_no_folder(where, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", str(tmp_path / where), *SMALL]) == 3
    assert str(tmp_path / where) in capsys.readouterr().err


def test_a_nearly_full_drive_is_not_touched(tmp_path, capsys):
    with small_file_system(tmp_path, 32 << 20) as folder:
        assert main(["bench", str(folder), "--size", "36MiB", "--rounds", "1"]) == 3
        said = capsys.readouterr().err
        assert "Ask for a smaller size" in said
        assert os.listdir(folder) == ["lost+found"]


def test_files_in_memory_are_called_that(capsys):
    try:
        folder = next(f for f in ("/dev/shm", "/run/shm") if os.access(f, os.W_OK))
    except StopIteration:
        pytest.skip("no tmpfs here")
    before = set(os.listdir(folder))
    assert main(["bench", folder, *SMALL]) == 0
    assert "keeps its files in memory" in capsys.readouterr().out
    assert main(["bench", folder, *SMALL, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(row["fs"], row["device"], row["cache_dropped"]) for row in rows} == {
        ("tmpfs", None, False)
    }
    assert set(os.listdir(folder)) - before == set()


@pytest.mark.parametrize(
    "wrong",
    [
        ["--size", "0"],
        ["--size", "much"],
        ["--rounds", "0"],
        ["--rounds", "1.5"],
        ["--direction", "up"],
        ["--memory", "aligned,soft"],
        ["--depth", "4,,8"],
        ["--fsync", "maybe"],
    ],
)
def test_a_wrong_command_line(wrong, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["bench", str(tmp_path), *wrong])
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("number", "status", "left"),
    [
        pytest.param(signal.SIGINT, 130, 0, marks=pytest.mark.thorough),
        (signal.SIGTERM, 143, 0),
        (signal.SIGKILL, -9, 1),
    ],
)
def test_runs_that_are_ended(tmp_path, number, status, left):
    process = subprocess.Popen(
        [*COMMAND, str(tmp_path), "--size", "8MiB", "--rounds", "1000", "--block", "4KiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not any(tmp_path.glob("*/data")) and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == status
    assert (out, "Traceback" in err) == ("", False)
    assert len(list(tmp_path.iterdir())) == left
    assert main(["bench", str(tmp_path), *SMALL, "--json"]) == 0
    assert list(tmp_path.iterdir()) == []
