"""`open_engine` chooses by what works here, and says why; what fails later falls back."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tensorspill
from tensorspill.engine import Request
from tensorspill.errors import UnsupportedError
from tensorspill.gds import evidence, probe
from tensorspill.opening import choose_engine
from tests.faults import small_file_system
from tests.gds.inside.conftest import LANE
from tests.gds.inside.moving import content, fresh, poisoned, read, write
from tests.standin.control import cufile

SIZE = 300_000


@pytest.fixture(autouse=True)
def untried() -> Iterator[None]:
    evidence.forget()
    yield
    evidence.forget()


def test_auto_takes_what_works(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "tensorspill.opening")
    array, data = fresh(SIZE)
    choice = choose_engine(tmp_path, "cuda")
    with tensorspill.open_engine(tmp_path, "cuda") as engine:
        assert engine.name == choice.backend == ("gds" if LANE == "cufile" else "aio")
        assert str(engine.device) == "cuda:0"
        assert choice.why in engine.statistics().notes
        assert choice.why in caplog.text
        assert choice.why.startswith("GPUDirect Storage works" if LANE == "cufile" else "no GPU")
        with engine.open("x", "w") as file:
            write(engine, file, array, 3)
            assert np.array_equal(read(engine, file, SIZE, 3), data)
    assert os.listdir(tmp_path) == ["x"], "the probe leaves nothing behind"


def test_what_was_asked_for_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for backend in ("aio", "gds"):
        with tensorspill.open_engine(tmp_path, "cuda:0", backend) as engine:
            assert engine.name == backend
        monkeypatch.setenv("TENSORSPILL_BACKEND", backend)
        choice = choose_engine(tmp_path, "cuda:0")
        assert (choice.backend, choice.asked) == (backend, True)
        assert "TENSORSPILL_BACKEND" in choice.why
        assert choose_engine(tmp_path, "cuda:0", "aio").backend == "aio"
        monkeypatch.delenv("TENSORSPILL_BACKEND")


def test_it_is_tried_once(tmp_path: Path):
    found = evidence.find(tmp_path, 0)
    (tmp_path / "below").mkdir()
    assert evidence.find(tmp_path / "below", 0) is found
    evidence.forget()
    assert evidence.find(tmp_path, 0) is not found


def test_options_choose_too(tmp_path: Path):
    with tensorspill.open_engine(tmp_path, "cuda:0", depth=8) as engine:
        assert engine.statistics().options["depth"] == (8, "argument")
    choice = choose_engine(tmp_path, "cuda:0", staging_bytes="64MiB")
    assert (choice.backend, "staging_bytes" in choice.why) == ("aio", True)
    if LANE == "cufile":
        assert choose_engine(tmp_path, "cuda:0", registered_bytes=0).backend == "gds"
    else:
        with pytest.raises(UnsupportedError, match="registered_bytes"):
            choose_engine(tmp_path, "cuda:0", registered_bytes=0)
    refused: list[dict[str, Any]]
    refused = [{"staging_bytes": 1 << 26, "registered_bytes": 0}, {"qdepth": 3}]
    for options in refused:
        with pytest.raises(UnsupportedError):
            tensorspill.open_engine(tmp_path, "cuda:0", **options)


def test_a_device_that_is_not_there(tmp_path: Path):
    for backend in ("auto", "aio", "gds"):
        with pytest.raises(UnsupportedError, match="cuda:7"):
            tensorspill.open_engine(tmp_path, "cuda:7", backend)


@pytest.mark.cufile
@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ("cuFileHandleRegister=5001", "5001"),
        ("cuFileHandleRegister=5008", "5008"),
        ("cuFileHandleRegister=5027", "5027"),
        ("cuFileHandleRegister=5030", "5030"),
        ("cuFileWrite=5033", "5033"),
        ("cuFileRead=errno:5", "operating system"),
        ("cuFileRead=short:1000", "1000 of"),
    ],
)
def test_where_it_does_not_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules, says):
    """kvikio#283, #508: a container without udev; only the probe's process meets it here."""
    monkeypatch.setenv("STANDIN_CUFILE_RULES", rules)
    choice = choose_engine(tmp_path, "cuda:0")
    assert choice.backend == "aio"
    assert says in choice.why
    with pytest.raises(UnsupportedError, match=says):
        tensorspill.open_engine(tmp_path, "cuda:0", "gds")
    with tensorspill.open_engine(tmp_path, "cuda:0") as engine, engine.open("x", "w") as file:
        array, data = fresh(SIZE)
        write(engine, file, array)
        assert np.array_equal(read(engine, file, SIZE), data)


@pytest.mark.cufile
def test_what_can_not_be_registered_still_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STANDIN_CUFILE_RULES", "cuFileBufRegister=5036")
    assert evidence.find(tmp_path, 0).works


@pytest.mark.parametrize("text", ["", "{", "[]", '{"properties": 5}', "\0\1"])
def test_a_malformed_cufile_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text):
    (tmp_path / "cufile.json").write_text(text)
    monkeypatch.setenv("CUFILE_ENV_PATH_JSON", str(tmp_path / "cufile.json"))
    choice = choose_engine(tmp_path, "cuda:0")
    assert choice.backend == "aio"
    assert "cufile.json" in choice.why
    with pytest.raises(UnsupportedError, match=r"cufile\.json"):
        tensorspill.open_engine(tmp_path, "cuda:0", "gds")


@pytest.mark.cufile
def test_a_probe_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("STANDIN_CUFILE_RULES", "cuFileHandleRegister=delay:60000000")
    begin = time.monotonic()
    found = evidence.find(tmp_path, 0, limit=4)
    assert time.monotonic() - begin < 30
    assert (found.works, found.usable, found.report.hung) == (False, False, True)
    assert "hung" in found.why
    assert os.listdir(tmp_path) == []
    assert choose_engine(tmp_path, "cuda:0").backend == "aio", "and that is remembered"


@pytest.mark.cufile
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_probe_that_crashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number):
    monkeypatch.setenv("STANDIN_CUFILE_RULES", "cuFileHandleRegister=delay:60000000")
    report: list[probe.Report] = []
    (tmp_path / "x").touch()
    thread = threading.Thread(target=lambda: report.append(probe.run(str(tmp_path / "x"), 0)))
    thread.start()
    children = Path(f"/proc/self/task/{thread.native_id}/children")
    while thread.is_alive() and not children.read_text():
        time.sleep(0.01)
    time.sleep(0.5)
    os.kill(int(children.read_text().split()[0]), number)
    thread.join()
    assert f"by signal {int(number)}" in report[0].failure


def test_no_room_for_a_probe(tmp_path: Path):
    """That says nothing about GPUDirect Storage: files that are there can be read."""
    with small_file_system(tmp_path, 2 << 20) as folder:
        data = content(1 << 20)
        (folder / "x").write_bytes(data.tobytes())
        room = os.statvfs(folder)
        (folder / "y").write_bytes(bytes(room.f_bavail * room.f_frsize - (64 << 10)))
        found = evidence.find(folder, 0)
        if LANE != "real":  # whose udev does not know this file system
            assert (found.works, found.usable, found.lasting) == (False, True, False)
            with (
                tensorspill.open_engine(folder, "cuda:0", "gds") as engine,
                engine.open("x") as file,
            ):
                assert np.array_equal(read(engine, file, 1 << 20), data)
        with tensorspill.open_engine(folder, "cuda:0") as engine, engine.open("x") as file:
            assert np.array_equal(read(engine, file, 1 << 20), data)


@pytest.mark.cufile
@pytest.mark.parametrize("rule", ["5030", "5036", "short:4096", "errno:5"])
def test_what_fails_later_falls_back_once(tmp_path: Path, rule, caplog):
    data = content(SIZE)
    (tmp_path / "x").write_bytes(data.tobytes())
    failing = f"cuFileRead={rule},cuFileReadAsync={rule}"
    with tensorspill.open_engine(tmp_path, "cuda:0", stream_ordered="no") as engine:
        with engine.open("x") as file, cufile().failing(failing):
            for _ in range(3):
                assert np.array_equal(read(engine, file, SIZE), data)
        statistics = engine.statistics()
        assert statistics.by_path["host"].nbytes == 3 * SIZE
        assert statistics.fallbacks == 1
        assert len([r for r in caplog.records if "going on by the host path" in r.message]) == 1
        with engine.open("y", "w") as file:
            write(engine, file, fresh(SIZE)[0])
        assert engine.statistics().by_path["direct"].nbytes > 0, "other files are not concerned"
    with (
        tensorspill.open_engine(tmp_path, "cuda:0", "gds", stream_ordered="no") as engine,
        engine.open("x") as file,
        cufile().failing(failing),
        pytest.raises(OSError),
    ):
        engine.submit([Request(poisoned(SIZE), file)]).result()


def test_opening_in_a_thread_without_a_context(tmp_path: Path):
    """cudf#15293: cuFile must not be opened before there is a context, in any thread."""
    failures: list[BaseException] = []

    def work() -> None:
        try:
            with (
                tensorspill.open_engine(tmp_path, "cuda:0", "gds") as engine,
                engine.open("x", "w") as file,
            ):
                array, data = fresh(SIZE)
                write(engine, file, array)
                assert np.array_equal(read(engine, file, SIZE), data)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failures
