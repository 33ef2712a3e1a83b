"""The folder of spill files: whose it is, who holds what, what is cleaned up and what never."""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tensorspill.errors import PermissionDeniedError, SpillError, UnsupportedError
from tensorspill.spill.folder import SpillFolder
from tensorspill.spill.place import MARKER
from tests.faults.limits import another_user

OURS = f"tensorspill-{os.geteuid()}"

CLAIMER = """
import sys
from tensorspill.spill.folder import SpillFolder
claims = [SpillFolder(sys.argv[1]).claim() for _ in range(int(sys.argv[2]))]
print(*[claim.name for claim in claims], flush=True)
sys.stdin.read()
"""


def start_claimer(place: Path, count: int = 1) -> tuple[subprocess.Popen[str], list[str]]:
    """Start a process that claims files and holds them until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIMER, str(place), str(count)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def spill_files(place: Path) -> set[str]:
    return {path.name for path in (place / OURS).iterdir()} - {MARKER}


def test_folder_is_made_with_marker_and_mode(tmp_path: Path) -> None:
    place = tmp_path / "a" / "b"
    folder = SpillFolder(place)
    assert Path(folder.path) == place / OURS
    for made in (tmp_path / "a", place, place / OURS):
        assert made.stat().st_mode & 0o777 == 0o700
    assert [path.name for path in Path(folder.path).iterdir()] == [MARKER]
    SpillFolder(place)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_mode_does_not_depend_on_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        with SpillFolder(tmp_path).claim() as claim:
            assert os.stat(claim.path).st_mode & 0o077 == 0
    finally:
        os.umask(before)
    assert (tmp_path / OURS).stat().st_mode & 0o777 == 0o700


def test_claims_are_separate_and_released(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    first, second = folder.claim(), folder.claim("gradients")
    assert spill_files(tmp_path) == {first.name, second.name}
    assert first.name.startswith("rank")
    assert second.name.startswith("gradients-")
    assert Path(first.path).stat().st_mode & 0o777 == 0o600
    first.release()
    first.release()
    assert first.released
    assert spill_files(tmp_path) == {second.name}
    del second
    assert spill_files(tmp_path) == set()


@pytest.mark.parametrize(("rank", "label"), [("7", "rank7"), ("../x", "rank0"), ("", "rank0")])
def test_name_has_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, label: str
) -> None:
    monkeypatch.setenv("RANK", rank)
    with SpillFolder(tmp_path).claim() as claim:
        assert claim.name == f"{label}-{os.getpid()}-0.spill"


def test_label_stays_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="label"):
        SpillFolder(tmp_path).claim("../x")


def test_only_our_own_file_is_removed(tmp_path: Path) -> None:
    claim = SpillFolder(tmp_path).claim()
    os.rename(claim.path, claim.path + ".moved")
    Path(claim.path).write_text("somebody's")
    claim.release()
    assert Path(claim.path).read_text() == "somebody's"
    assert Path(claim.path + ".moved").exists()


def test_file_removed_behind_our_back(tmp_path: Path) -> None:
    claim = SpillFolder(tmp_path).claim()
    os.unlink(claim.path)
    claim.release()
    assert claim.released


def test_folder_removed_behind_our_back_is_made_again(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    (tmp_path / OURS / MARKER).unlink()
    (tmp_path / OURS).rmdir()
    with folder.claim() as claim:
        assert spill_files(tmp_path) == {claim.name}


def refused(place: Path) -> SpillError:
    with pytest.raises((UnsupportedError, PermissionDeniedError)) as caught:
        SpillFolder(place).claim()
    assert caught.value.path
    return caught.value


def test_links_and_files_are_refused(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (tmp_path / "link").symlink_to(real)
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    assert "symbolic link" in str(refused(tmp_path / "link"))
    refused(tmp_path / "dangling")
    assert "no folder" in str(refused(tmp_path / "file"))
    assert "no folder" in str(refused(tmp_path / "file" / "below"))
    (real / OURS).symlink_to(tmp_path)
    assert "symbolic link" in str(refused(real))
    (real / OURS).unlink()
    (real / OURS).write_text("")
    assert "file" in str(refused(real))
    assert not (tmp_path / MARKER).exists()


def test_folder_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    ours = tmp_path / OURS
    ours.mkdir(0o700)
    (ours / "thesis.txt").write_text("important")
    assert "no marker" in str(refused(tmp_path))
    assert (ours / "thesis.txt").read_text() == "important"
    (ours / "thesis.txt").unlink()
    ours.chmod(0o755)
    assert "0755" in str(refused(tmp_path))
    ours.chmod(0o700)
    SpillFolder(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="giving a folder to another user needs root")
def test_folders_of_other_users(tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir()
    os.chown(place, 12345, 12345)
    assert isinstance(refused(place), PermissionDeniedError)
    # A place for everybody, as /tmp is, will do.
    place.chmod(0o1777)
    SpillFolder(place)
    os.chown(place / OURS, 12345, 12345)
    assert isinstance(refused(place), PermissionDeniedError)


def test_place_without_permission(tmp_path: Path) -> None:
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/tmp"):
            folder.chmod(0o755)
    place = tmp_path / "place"
    place.mkdir(0o755)
    if os.geteuid() != 0:
        place.chmod(0o555)
    with another_user():
        error = refused(place)
        assert isinstance(error, PermissionDeniedError)
        assert error.errno is not None
        assert isinstance(refused(place / "below"), PermissionDeniedError)


def test_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    process, names = start_claimer(tmp_path, 2)
    others = [f"{names[0]}.bak", "notes.txt", "rank0-1.spill", "rank0-1-2.spill.d"]
    for name in others:
        (tmp_path / OURS / name).write_text("keep")
    (tmp_path / OURS / "rank0-1-2.spill").mkdir()
    (tmp_path / OURS / "rank0-1-3.spill").symlink_to(tmp_path / OURS / "notes.txt")
    os.mkfifo(tmp_path / OURS / "rank0-1-4.spill")
    kept = {*others, "rank0-1-2.spill", "rank0-1-3.spill", "rank0-1-4.spill"}
    with SpillFolder(tmp_path).claim() as claim:
        assert spill_files(tmp_path) == {*kept, *names, claim.name}, "that process lives"
    process.kill()
    process.wait()
    process.communicate()
    with SpillFolder(tmp_path).claim() as claim:
        assert spill_files(tmp_path) == {*kept, claim.name}


@pytest.mark.thorough
def test_processes_race_for_a_new_place(tmp_path: Path) -> None:
    place = tmp_path / "new"
    started: list[tuple[subprocess.Popen[str], list[str]]] = []
    threads = [
        threading.Thread(target=lambda: started.append(start_claimer(place, 2))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    names = [name for _, claimed in started for name in claimed]
    assert len(names) == len(set(names)) == 8
    assert spill_files(place) == set(names)
    for process, _ in started:
        process.communicate("")
        assert process.returncode == 0
    assert spill_files(place) == set()


def test_threads_race_for_claims(tmp_path: Path) -> None:
    claims = []
    threads = [
        threading.Thread(target=lambda: claims.append(SpillFolder(tmp_path / "new").claim()))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({claim.name for claim in claims}) == 8
    assert spill_files(tmp_path / "new") == {claim.name for claim in claims}


def test_forked_child_leaves_the_parents_file_alone(tmp_path: Path) -> None:
    claim = SpillFolder(tmp_path).claim()
    child = os.fork()
    if child == 0:
        claim.release()
        del claim
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert spill_files(tmp_path) == {claim.name}
    with SpillFolder(tmp_path).claim() as other:
        assert spill_files(tmp_path) == {claim.name, other.name}, "the parent's lock still holds"
    claim.release()
    assert spill_files(tmp_path) == set()


def test_child_that_lives_on_keeps_no_lock(tmp_path: Path) -> None:
    folder = SpillFolder(tmp_path)
    claim = folder.claim()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        fd = os.open(claim.path, os.O_RDWR)
        claim.release()
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(fd)
        with folder.claim() as other:
            assert spill_files(tmp_path) == {other.name}
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_no_descriptor_is_lost(tmp_path: Path) -> None:
    def count() -> int:
        return len(os.listdir("/proc/self/fd"))

    (tmp_path / "file").write_text("")
    before = count()
    for _ in range(3):
        SpillFolder(tmp_path).claim().release()
        for bad in (tmp_path / "file", tmp_path / "file" / "x"):
            with pytest.raises(SpillError):
                SpillFolder(bad)
        with pytest.raises(SpillError):
            SpillFolder(tmp_path).claim("no good")
    assert count() == before
