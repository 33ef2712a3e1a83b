"""On this machine: any path, file systems and drivers that hang, and the stand-in driver."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tensorspill.doctor import storage
from tensorspill.doctor.children import ask
from tensorspill.doctor.examination import examine
from tensorspill.doctor.path_child import look
from tests.faults.fuse import faulty_file_system
from tests.faulty_drive.rules import Rule

#: Makes every child give up what takes long on purpose, and no child that works.
LIMIT = 20.0


def rows(found):
    return {row.layer: row for row in found.rows}


def test_a_folder_that_works(tmp_path):
    found = examine(tmp_path)
    layers = rows(found)
    assert layers["folder"].state == "ok"
    assert layers["O_DIRECT alignment"].state in ("ok", "no")
    assert found.backend("aio").state == found.backend("auto").state == "ok"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["missing", "file", "pipe", "device", "loop", "long", "odd name"])
def test_paths_that_are_no_folders(kind, tmp_path):
    path = tmp_path / "there"
    if kind == "file":
        path.write_text("x")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path = Path("/dev/null")
    elif kind == "loop":
        path.symlink_to("there")
    elif kind == "long":
        path = tmp_path / ("x" * 5000)
    elif kind == "odd name":
        path = tmp_path / "\x1b[31m[bold]\n\udcff"
    tried = look(str(path))
    json.dumps(tried)
    row = storage.folder(str(path), tried)
    assert row.state == "no"
    assert row.remedy


@pytest.mark.thorough
@pytest.mark.parametrize("path", ["a\0b", "/proc", "/no/such/\x1b[31m[bold]\n\udcff"])
def test_a_path_that_is_no_place_for_files(path):
    found = examine(path, limit=LIMIT)
    assert rows(found)["folder"].state == "no"
    for name in ("auto", "aio", "gds"):
        assert found.backend(name).state == "no"
    assert found.backend("aio").remedy


def test_a_current_folder_that_has_gone(tmp_path):
    code = (
        "import os; from tensorspill.doctor.examination import examine\n"
        f"os.mkdir({str(tmp_path / 'x')!r}); os.chdir({str(tmp_path / 'x')!r})\n"
        f"os.rmdir({str(tmp_path / 'x')!r})\n"
        "print(examine('.', limit=1e-3).backend('aio').state)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() in ("no", "unknown"), done.stderr


def test_a_file_system_that_does_not_answer(tmp_path):
    with faulty_file_system(tmp_path) as drive:
        drive.rules(Rule(op="write", stall=True), Rule(op="fsync", stall=True))
        found = examine(drive.folder, limit=4.0)
        assert rows(found)["folder"].state == "no"
        assert "did not answer within 4 s" in rows(found)["folder"].evidence
        assert found.backend("auto").state == "no"


def test_a_file_system_that_fails(tmp_path):
    with faulty_file_system(tmp_path) as drive:
        drive.rules(Rule(op="write", error=5))
        found = examine(drive.folder, limit=LIMIT)
        assert rows(found)["folder"].state == "no"
        assert "Input/output error" in rows(found)["folder"].evidence


def test_no_child_is_left_behind_that_does_not_answer():
    found = ask({"one": ["path_child", "/"], "two": ["cuda_child"]}, 0.01)
    assert all("did not answer" in answer["problem"] for answer in found.values())


def test_a_child_that_ends_by_itself():
    found = ask({"one": ["no_such_module"], "two": ["path_child"]}, LIMIT)
    assert "status 1" in found["one"]["problem"]
    assert "No module" in found["one"]["problem"]
    assert "IndexError" in found["two"]["problem"]


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """A CUDA driver that does something when it is loaded."""
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("no gcc")

    def build(body):
        source = tmp_path / "driver.c"
        source.write_text(
            "#include <stdlib.h>\n#include <unistd.h>\n"
            f"__attribute__((constructor)) static void begin(void) {{ {body} }}\n"
        )
        library = tmp_path / "libcuda.so.1"
        subprocess.run([gcc, "-shared", "-fPIC", "-o", library, source], check=True)
        monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))

    return build


@pytest.mark.parametrize(
    ("body", "said", "limit"),
    [("for (;;) pause();", "hangs", 20.0), ("abort();", "signal 6", LIMIT)],
)
def test_a_driver_that_hangs_or_crashes(body, said, limit, driver, tmp_path):
    driver(body)
    found = examine(tmp_path, limit=limit)  # the other children must end in time on a busy machine
    assert rows(found)["driver"].state == "no"
    assert said in rows(found)["driver"].evidence
    assert found.backend("gds").state in ("no", "unknown")
    assert found.backend("auto").state == "ok"
