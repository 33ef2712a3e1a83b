"""Full disks, failing drives and odd file systems."""

import contextlib
import errno
import os
import subprocess

import pytest

from tensorspill.checkpoint.files.commit import begin, latest
from tensorspill.errors import BrokenError, NoSpaceError
from tests.checkpoint.files.helpers import fresh, holds, load, mixed_state, save, write
from tests.faults.checks import descriptors
from tests.faults.file_systems import small_file_system
from tests.faults.fuse import faulty_file_system
from tests.faulty_drive.rules import Rule


@contextlib.contextmanager
def tmpfs(tmp_path, size):
    folder = tmp_path / "tmpfs"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting is not possible here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def small():
    return {"a": fresh((1000, 1000)), "b": fresh((7,))}


def large():
    return {"a": fresh((8000, 1000)), "b": fresh((7,))}


def fill(path):
    """Write until there is room for nothing."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for nbytes in (1 << 20, 4096):
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(nbytes))
                os.fsync(fd)
    os.close(fd)


def unharmed(root, content):
    """The checkpoint before is there and nothing else; and saving works again."""
    assert latest(root) == str(root / "good")
    assert holds(root / "good", content)
    assert {p.name for p in root.iterdir() if not p.name.startswith(".")} == {"good", "latest"}
    again = small()
    save(root, "again", again)
    assert holds(root / "again", again)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_full_file_system(tmp_path, kind):
    place = tmpfs(tmp_path, "24m") if kind == "tmpfs" else small_file_system(tmp_path, 24 << 20)
    with place as folder:
        root, content = folder / "root", small()
        save(root, "good", content)
        before = descriptors()
        with pytest.raises(NoSpaceError):
            save(root, "bad", large())
        assert descriptors() == before
        unharmed(root, content)


def test_recycled_extents_make_way(tmp_path):
    """Of no use for a larger checkpoint, they don't keep it from being saved."""
    with tmpfs(tmp_path, "24m") as folder:
        for step in range(2):
            save(folder / "root", f"s{step}", small(), keep=1)
        larger = {"a": fresh((3300, 1000))}
        save(folder / "root", "larger", larger)
        assert holds(folder / "root" / "larger", larger)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_a_file_system_that_is_full_at_the_commit(tmp_path, kind):
    place = tmpfs(tmp_path, "24m") if kind == "tmpfs" else small_file_system(tmp_path, 24 << 20)
    with place as folder:
        root, content = folder / "root", small()
        save(root, "good", content)
        with begin(root, "bad") as pending:
            manifest = write(pending, small())
            filler = folder / "filler"
            fill(filler)
            with pytest.raises(NoSpaceError):
                pending.commit(manifest)
            assert not pending.renamed
        filler.unlink()
        unharmed(root, content)


@pytest.mark.parametrize("writers", [1, 2])
@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (Rule("*rank*", "write", begin=10 << 20, error=errno.EIO), errno.EIO),
        (Rule("*rank0*", "write", begin=5 << 20, error=errno.EIO), errno.EIO),
        (Rule("*rank*", "write", begin=9 << 20, error=errno.ENOSPC), errno.ENOSPC),
        (Rule("*rank*", "fsync", error=errno.EIO), errno.EIO),
        (Rule("*rank*", "fallocate", error=errno.ENOSPC), errno.ENOSPC),
        (Rule("*manifest*", "write", error=errno.EIO), errno.EIO),
        (Rule("*manifest*", "fsync", error=errno.EIO), errno.EIO),
    ],
    ids=lambda value: str(value).replace("tests.", ""),
)
def test_a_drive_that_fails_in_the_middle(tmp_path, rule, error, writers):
    with faulty_file_system(tmp_path) as files:
        root, content = files.folder / "root", small()
        save(root, "good", content)
        files.rules(rule)
        before = descriptors()
        with pytest.raises(BrokenError) as caught:
            save(root, "bad", large(), writers=writers)
        assert caught.value.errno == error
        assert descriptors() == before
        files.rules()
        unharmed(root, content)


def test_a_failure_after_the_rename_is_told(tmp_path):
    with faulty_file_system(tmp_path) as files:
        root, content = files.folder / "root", small()
        save(root, "good", content)
        with begin(root, "new") as pending:
            fresh_content = small()
            manifest = write(pending, fresh_content)
            files.rules(Rule("*latest*", "write", error=errno.EIO))
            with pytest.raises(BrokenError):
                pending.commit(manifest)
            assert pending.renamed
        files.rules()
        # `latest` decides; the new one is whole and may be loaded by its name.
        assert latest(root) == str(root / "good")
        assert holds(root / "good", content)
        assert holds(root / "new", fresh_content)


def test_a_drive_that_fails_to_read(tmp_path):
    with faulty_file_system(tmp_path) as files:
        path = save(files.folder / "root", "a", large())
        files.rules(Rule("*rank0*", "read", begin=8 << 20, error=errno.EIO))
        before = descriptors()
        with pytest.raises(BrokenError) as caught:
            load(path)
        assert caught.value.errno == errno.EIO
        assert descriptors() == before


@pytest.mark.parametrize(
    "rules",
    [
        [Rule(op="open", direct=True, error=errno.EINVAL)],
        [Rule(op="fallocate", error=errno.EOPNOTSUPP)],
        [Rule(op="write", shorten=8192), Rule(op="read", shorten=12288)],
    ],
    ids=["no O_DIRECT", "no fallocate", "short"],
)
def test_file_systems_with_less(tmp_path, rules):
    with faulty_file_system(tmp_path, synchronous=True) as files:
        files.rules(*rules)
        content = mixed_state()
        path = save(files.folder / "root", "a", content, writers=2)
        assert holds(path, content)


def test_tmpfs(tmp_path):
    with tmpfs(tmp_path, "64m") as folder:
        for step in range(3):
            content = mixed_state()
            path = save(folder / "root", f"s{step}", content, writers=2, keep=1)
            assert holds(path, content)
        assert os.listdir(folder / "root" / ".tensorspill-recycled")
