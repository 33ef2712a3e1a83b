"""``tensorspill doctor``: terminals of any width, JSON, exit statuses."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from tensorspill.cli import main
from tensorspill.commands.doctor_text import show
from tensorspill.doctor.examination import examine
from tensorspill.doctor.row import Diagnosis, Row
from tests.doctor.trees import gpu_tree

COMMAND = [sys.executable, "-m", "tensorspill.cli", "doctor"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("tree")
    gpu_tree(root)
    return examine("/raid/checkpoints", str(root))


@pytest.mark.parametrize("width", [20, 40, 69, 70, 80, 200])
def test_nothing_is_wider_than_the_terminal_nor_lost(width, found):
    file = io.StringIO()
    show(found, "gds", Console(file=file, width=width, highlight=False))
    said = file.getvalue()
    assert max(map(len, said.splitlines())) <= width
    # Readable without colour: there is none here.
    assert "\x1b" not in said
    squeezed = re.sub(r"\s", "", said)
    for row in found.rows + found.backends:
        assert re.sub(r"\s", "", row.layer) in squeezed
        for text in (row.evidence, row.remedy):
            words = [word for word in text.split() if len(word) < 15]
            assert all(word in squeezed for word in words)
    assert "isnotknowntowork" in squeezed


def test_what_paths_hold_does_not_reach_the_terminal():
    row = Row("folder", "no", "/x\x1b[31m\n[bold]\udcff\u202e", "\x07Name [another]")
    verdicts = tuple(Row(name, "no", "[/]") for name in ("auto", "aio", "gds"))
    file = io.StringIO()
    diagnosis = Diagnosis("/x\x1b[2J[red]", "/", (row,), verdicts)
    show(diagnosis, "auto", Console(file=file, width=80, force_terminal=True, color_system=None))
    said = file.getvalue()
    assert "[bold]" in said
    assert "[red]" in said
    assert "Name [another]" in said
    assert not re.search("[\x07\x1b\u202e\udcff]", said)


def test_json_is_one_value(tmp_path, capsys):
    gpu_tree(tmp_path)
    assert main(["doctor", "/raid", "--root", str(tmp_path), "--json", "--backend", "gds"]) == 1
    said = capsys.readouterr()
    value = json.loads(said.out)
    assert said.err == ""
    assert said.out.count("\n") == 1
    assert (value["backend"], value["works"], value["path"]) == ("gds", False, "/raid")
    assert all(row.keys() == {"layer", "state", "evidence", "remedy"} for row in value["rows"])
    assert [row["layer"] for row in value["backends"]] == ["auto", "aio", "gds"]


def test_the_status_says_whether_the_backend_would_work(tmp_path, capsys):
    assert main(["doctor", str(tmp_path), "--backend", "aio"]) == 0
    assert "Backend aio would work" in capsys.readouterr().out
    assert main(["doctor", str(tmp_path / "missing"), "--backend", "aio"]) == 1
    assert "Backend aio would not work" in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", [["--backend", "x"], ["--limit", "0"], ["--limit", "nan"], ["--gpu", "x"], ["a", "b"]]
)
def test_a_wrong_command_line(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["doctor", *wrong])
    assert ended.value.code == 2
    assert capsys.readouterr().out == ""


@pytest.mark.thorough
def test_a_terminal_of_few_characters_and_one_that_goes_away(tmp_path):
    gpu_tree(tmp_path)
    command = [*COMMAND, "/raid/ü\udcff", "--root", str(tmp_path)]
    environ = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "70"}
    done = subprocess.run(command, capture_output=True, env=environ, timeout=120)
    assert done.returncode == 1
    assert "memlock" in done.stdout.decode("ascii")
    assert done.stderr == b""
    reading, writing = os.pipe()
    os.close(reading)
    command.append("--json")
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=120)
    os.close(writing)
    assert done.returncode == 128 + signal.SIGPIPE
    assert done.stderr == b""


def test_an_interrupt_ends_it_with_its_children(tmp_path):
    process = subprocess.Popen([*COMMAND, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    children: list[str] = []
    deadline = time.monotonic() + 60
    while not children and time.monotonic() < deadline and process.poll() is None:
        for task in os.listdir(f"/proc/{process.pid}/task"):
            with open(f"/proc/{process.pid}/task/{task}/children") as file:
                children += file.read().split()
        time.sleep(0.005)
    assert children
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    # To a shell both are 130. Python ends by the signal itself if that came while exec() ran a
    # text, as it does for each dataclass that is imported, whoever catches the exception.
    assert process.returncode in (130, -signal.SIGINT)
    deadline = time.monotonic() + 30
    while any(os.path.exists(f"/proc/{pid}/exe") for pid in children):
        assert time.monotonic() < deadline, "a child was left behind"
        time.sleep(0.01)
