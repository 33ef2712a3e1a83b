"""The command line: statuses, errors, signals, and what starts when."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tensorspill import __version__
from tensorspill.cli import COMMANDS, main

COMMAND = [sys.executable, "-m", "tensorspill.cli"]
#: More threads are no faster with so few steps.
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert all(name in said for name in COMMANDS)


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert __version__ in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong",
    [[], ["nothing"], ["demo", "--steps", "0"], ["demo", "--steps", "x"], ["demo", "--what"]],
)
def test_a_wrong_command_line(wrong, capsys):
    with pytest.raises(SystemExit) as ended:
        main(wrong)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert "usage:" in said.err
    assert said.out == ""


def test_an_error_is_said_in_one_line(tmp_path, capsys):
    status = main(["demo", "--text", str(tmp_path / "missing"), "--json"])
    assert status == 3
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("tensorspill: Can't read the text")
    assert "missing" in said.err
    assert said.err.count("\n") == 1


def test_help_does_not_import_torch():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys\n"
            "from tensorspill.cli import main\n"
            "try: main(['demo', '--help'])\n"
            "except SystemExit: pass\n"
            "sys.exit('torch' in sys.modules)",
        ],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("number", "status"),
    [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.thorough)],
)
def test_a_signal_ends_it_and_nothing_is_left(tmp_path, number, status):
    process = subprocess.Popen(
        [*COMMAND, "demo", "--json", "--folder", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    deadline = time.monotonic() + 120
    while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == status
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.thorough
def test_a_reader_that_goes_away(tmp_path):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*COMMAND, "demo", "--steps", "1", "--json", "--folder", str(tmp_path)],
        stdout=writing,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        timeout=120,
    )
    os.close(writing)
    assert done.returncode == 141
    assert done.stderr == ""
    assert list(tmp_path.iterdir()) == []
