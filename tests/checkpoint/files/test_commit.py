"""Commit: whole or not at all, one job at a time, and nothing of others is touched."""

import os
import stat

import pytest
from safetensors.torch import load_file

from tensorspill.checkpoint.files.commit import begin, latest, prune, sweep
from tensorspill.checkpoint.files.opened import read_manifest
from tensorspill.checkpoint.files.reading import Reader
from tensorspill.errors import (
    BrokenError,
    BusyError,
    ClosedError,
    MissingFileError,
    UnsupportedError,
)
from tests.checkpoint.files.helpers import fresh, holds, save, write
from tests.faults.child import in_child


def state(rows=300):
    return {"a": fresh((rows, 1024)), "b": fresh((7,))}


def names(root):
    return {path.name for path in root.iterdir() if not path.name.startswith(".")}


def recycled(root):
    place = root / ".tensorspill-recycled"
    return sorted(place.iterdir()) if place.exists() else []


def test_the_newest_is_the_latest(tmp_path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    for step in range(3):
        content = state()
        path = save(tmp_path / "deep" / "root", f"step-{step}", content, step=step)
        assert latest(tmp_path / "deep" / "root") == path
        assert holds(path, content)
        assert read_manifest(path).sequence == step + 1
        assert read_manifest(path).step == step


def test_only_its_owner_may_look(tmp_path):
    path = save(tmp_path / "root", "a", state())
    for folder, _, files in os.walk(tmp_path / "root"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for file in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, file)).st_mode) == 0o600
    assert not (tmp_path / "root" / "a.saving").exists()
    assert set(os.listdir(path)) == {
        "manifest.json", "rank0.safetensors", ".tensorspill-checkpoint",
    }  # fmt: skip


def test_abandoned_is_as_if_it_had_never_been(tmp_path):
    content = state()
    path = save(tmp_path, "a", content)
    with begin(tmp_path, "b") as pending:
        write(pending, state())
    pending.abandon()
    assert names(tmp_path) == {"a", "latest"}
    assert latest(tmp_path) == path
    with pytest.raises(ClosedError):
        pending.commit(read_manifest(path))


def test_an_error_in_the_block_abandons(tmp_path):
    def fail(pending):
        write(pending, state())
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), begin(tmp_path, "b") as pending:
        fail(pending)
    assert names(tmp_path) == set()


def test_files_that_are_not_as_the_manifest_says_are_not_committed(tmp_path):
    content = state()
    with begin(tmp_path, "a") as pending:
        manifest = write(pending, content)
        os.truncate(os.path.join(pending.folder, "rank0.safetensors"), 5000)
        with pytest.raises(UnsupportedError):
            pending.commit(manifest)
        assert not pending.renamed
        os.unlink(os.path.join(pending.folder, "rank0.safetensors"))
        with pytest.raises(MissingFileError):
            pending.commit(manifest)
    assert latest(tmp_path) is None


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_old_ones_go_when_new_ones_are_there(tmp_path, keep):
    contents = [state() for _ in range(5)]
    for step, content in enumerate(contents):
        save(tmp_path, f"s{step}", content, keep=keep)
        expected = {f"s{i}" for i in range(max(step + 1 - keep, 0), step + 1)}
        assert names(tmp_path) == expected | {"latest"}
        for i in range(max(step + 1 - keep, 0), step + 1):
            assert holds(tmp_path / f"s{i}", contents[i])


def test_prune_never_removes_the_latest(tmp_path):
    for step in range(4):
        save(tmp_path, f"s{step}", state())
    (tmp_path / "latest").write_text("s1\n")
    assert set(prune(tmp_path, 2)) == {"s0", "s2"}
    assert names(tmp_path) == {"s1", "s3", "latest"}
    with pytest.raises(UnsupportedError):
        prune(tmp_path, 0)
    with begin(tmp_path, "x") as pending, pytest.raises(UnsupportedError):
        pending.commit(read_manifest(tmp_path / "s1"), keep=0)


def test_what_others_put_there_stays(tmp_path):
    save(tmp_path, "old", state())
    (tmp_path / "old" / "notes.txt").write_text("mine")
    (tmp_path / "foreign.saving").mkdir()
    (tmp_path / "foreign.saving" / "file").write_text("mine")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / ".tensorspill-checkpoint").write_text("")
    (tmp_path / "linked.saving").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file.saving").write_text("mine")
    save(tmp_path, "new", state(), keep=1)
    assert names(tmp_path) == {
        "old", "new", "latest", "foreign.saving", "linked.saving", "file.saving", "elsewhere",
    }  # fmt: skip
    assert (tmp_path / "old" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "elsewhere" / ".tensorspill-checkpoint").exists()
    assert latest(tmp_path) == str(tmp_path / "new")
    with pytest.raises(UnsupportedError):
        begin(tmp_path, "foreign")


def test_a_load_removes_nothing(tmp_path):
    path = save(tmp_path, "a", state())
    (tmp_path / "b.saving").mkdir()
    assert latest(tmp_path) == path
    Reader(path).close()
    assert (tmp_path / "b.saving").exists()
    assert sweep(tmp_path) == ("b.saving",)
    assert names(tmp_path) == {"a", "latest"}


def test_two_jobs_in_one_folder(tmp_path):
    content = state()

    def other():
        try:
            begin(tmp_path, "b")
        except BusyError as error:
            return error.path
        return None

    with begin(tmp_path, "a") as pending:
        manifest = write(pending, content)
        assert in_child(other) == str(tmp_path)
        with pytest.raises(BusyError):
            begin(tmp_path, "b")
        with pytest.raises(BusyError):
            prune(tmp_path, 1)
        with pytest.raises(BusyError):
            sweep(tmp_path)
        path = pending.commit(manifest)
    assert in_child(other) is None
    assert holds(path, content)


def test_a_forked_child_does_not_hold_nor_free_the_lock(tmp_path):
    pending = begin(tmp_path, "a")
    in_child(pending.abandon)
    assert os.path.isdir(pending.folder)
    with pytest.raises(BusyError):
        begin(tmp_path, "b")
    pending.abandon()
    begin(tmp_path, "b").abandon()


def test_names_may_be_taken_or_replaced(tmp_path):
    first, second = state(), state(500)
    save(tmp_path, "a", first)
    with pytest.raises(UnsupportedError):
        begin(tmp_path, "a")
    (tmp_path / "mine").mkdir()
    with pytest.raises(UnsupportedError):
        begin(tmp_path, "mine", replace=True)
    path = save(tmp_path, "a", second, replace=True)
    assert holds(path, second)
    assert names(tmp_path) == {"a", "latest", "mine"}
    assert read_manifest(path).sequence == 2


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "/a", "latest", "a.saving", "b.removed", ".a", "a\n", "é"]
)
def test_names_that_are_not_allowed(tmp_path, name):
    with pytest.raises(UnsupportedError):
        begin(tmp_path, name)


def test_a_root_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UnsupportedError):
        begin(tmp_path / "file", "a")
    with pytest.raises((UnsupportedError, BrokenError)):
        begin(tmp_path / "file" / "below", "a")


class TestRecycling:
    """Extents of removed checkpoints are written again, when nobody can see them change."""

    def test_they_are_reused_after_the_commit_only(self, tmp_path):
        contents = [state(2000) for _ in range(4)]
        inodes = []
        for step, content in enumerate(contents):
            path = save(tmp_path, f"s{step}", content, keep=1)
            inodes.append(os.stat(os.path.join(path, "rank0.safetensors")).st_ino)
            assert holds(path, content)
        assert inodes[2] == inodes[0]
        assert inodes[3] == inodes[1]
        assert inodes[0] != inodes[1]

    @pytest.mark.parametrize("rows", [100, 1500, 1999, 2001, 3500])
    def test_files_of_other_sizes(self, tmp_path, rows):
        for step in range(3):
            content = state(rows if step == 2 else 2000)
            path = save(tmp_path, f"s{step}", content, keep=1)
        assert holds(path, content)
        file = os.path.join(path, "rank0.safetensors")
        assert os.stat(file).st_size == read_manifest(path).files[0].nbytes
        load_file(file)

    def test_a_file_that_somebody_reads_is_not_touched(self, tmp_path):
        content = state()
        path = save(tmp_path, "s0", content)
        mapped = load_file(os.path.join(path, "rank0.safetensors"))
        with open(os.path.join(path, "rank0.safetensors"), "rb") as opened:
            save(tmp_path, "s1", state(), keep=1)
            assert recycled(tmp_path) == []
            save(tmp_path, "s2", state(), keep=1)
            assert len(opened.read()) == os.fstat(opened.fileno()).st_size
        assert (mapped["a"] == content["a"]).sum() > 0

    def test_a_file_with_a_second_name_is_not_touched(self, tmp_path):
        path = save(tmp_path, "s0", state())
        os.link(os.path.join(path, "rank0.safetensors"), tmp_path / "backup")
        before = (tmp_path / "backup").read_bytes()
        for step in range(1, 4):
            save(tmp_path, f"s{step}", state(), keep=1)
        assert (tmp_path / "backup").read_bytes() == before

    def test_they_never_take_more_than_one_checkpoint(self, tmp_path):
        for step in range(5):
            save(tmp_path, f"s{step}", state(1000))
        save(tmp_path, "small", state(200), keep=1)
        held = sum(path.stat().st_size for path in recycled(tmp_path))
        assert held <= read_manifest(tmp_path / "small").nbytes

    def test_they_outlive_a_save_that_failed(self, tmp_path):
        for step in range(2):
            save(tmp_path, f"s{step}", state(), keep=1)
        assert len(recycled(tmp_path)) == 1
        with begin(tmp_path, "s2") as pending:
            assert recycled(tmp_path) == []
            assert os.listdir(os.path.join(pending.folder, "recycled"))
        assert len(recycled(tmp_path)) == 1
