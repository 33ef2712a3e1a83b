"""The folder to measure in: room, what killed runs leave, what is not ours."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tensorspill.errors import BrokenError, MissingFileError, NoSpaceError
from tensorspill.profiling.place import MARKER, PREFIX, room_in, working_folder
from tests.faults import small_file_system

HOLD = """
import sys, time
from tensorspill.profiling.place import working_folder
with working_folder(sys.argv[1], 0) as folder:
    (folder / "data").write_bytes(b"x" * 4096)
    print(folder, flush=True)
    time.sleep(60)
"""


def start(folder):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def end(process, number):
    process.send_signal(number)
    process.wait(30)
    process.stdout.close()


OTHERS = [pytest.param(n, marks=pytest.mark.thorough) for n in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("number", [signal.SIGINT, *OTHERS])
def test_signals_leave_nothing(number, tmp_path):
    process, _ = start(tmp_path)
    end(process, number)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_goes_with_the_next(tmp_path):
    process, left = start(tmp_path)
    end(process, signal.SIGKILL)
    assert os.listdir(left)
    with working_folder(tmp_path, 0) as folder:
        assert list(tmp_path.iterdir()) == [folder]
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_stays(tmp_path):
    process, used = start(tmp_path)
    try:
        with working_folder(tmp_path, 0):
            assert os.path.exists(os.path.join(used, "data"))
        assert os.path.exists(os.path.join(used, "data"))
    finally:
        end(process, signal.SIGKILL)


def test_what_is_not_ours_stays(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o700)
    (outside / MARKER).write_text("")
    place = tmp_path / "place"
    place.mkdir()
    (place / f"{PREFIX}link").symlink_to(outside)
    (place / f"{PREFIX}file").write_text("")
    for name, mode, marked in (("unmarked", 0o700, False), ("open", 0o755, True)):
        (place / f"{PREFIX}{name}").mkdir()
        (place / f"{PREFIX}{name}").chmod(mode)
        (place / f"{PREFIX}{name}" / (MARKER if marked else "data")).write_text("")
    before = sorted(place.iterdir())
    with working_folder(place, 0):
        pass
    assert sorted(place.iterdir()) == before
    assert list(outside.iterdir()) == [outside / MARKER]


def test_a_drive_is_never_filled(tmp_path):
    with small_file_system(tmp_path, 64 << 20) as folder:
        room = room_in(folder)
        state = os.statvfs(folder)
        assert 0 < room < state.f_bavail * state.f_frsize
        with pytest.raises(NoSpaceError, match="smaller size") as caught:  # noqa: SIM117
            with working_folder(folder, room + 4096):
                pass
        assert caught.value.free == room
        assert [name for name in os.listdir(folder) if name.startswith(PREFIX)] == []
        with working_folder(folder, room):
            pass


def test_folders_that_can_not_be_used(tmp_path):
    for wrong, error in ((tmp_path / "missing", MissingFileError), (__file__, BrokenError)):
        with pytest.raises(error), working_folder(wrong, 0):
            pass


def test_errors_of_the_body_are_its_own(tmp_path):
    with pytest.raises(FileExistsError), working_folder(tmp_path, 0):
        raise FileExistsError
    assert list(tmp_path.iterdir()) == []


def test_handlers_of_others_are_kept(tmp_path):
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with working_folder(tmp_path, 0):
        time.sleep(0)
    assert {number: signal.getsignal(number) for number in before} == before
