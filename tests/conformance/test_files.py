"""Opening, naming and closing files."""

import os
from pathlib import Path

import pytest

from tensorspill.engine import Engine, Request
from tensorspill.errors import (
    BrokenError,
    ClosedError,
    MissingFileError,
    SpillError,
    UnsupportedError,
)
from tests.conformance.data import equal, poisoned, random_bytes, read, write
from tests.conformance.lanes import Lane


def test_modes(engine: Engine, tmp_path: Path):
    content = random_bytes(1000)
    with engine.open("x", "w") as file:
        write(engine, file, content)
    with engine.open("x", "r+") as file:
        write(engine, file, content[:10], 5)
        assert file.size == 1000
    with engine.open("x", "r") as file:
        assert equal(read(engine, file, 10, 5), content[:10])
        with pytest.raises(UnsupportedError, match="reading only") as caught:
            write(engine, file, content)
        assert caught.value.path == str(tmp_path / "x")
    with pytest.raises(BrokenError) as broken:
        engine.open("x", "x")
    assert isinstance(broken.value, OSError)
    with engine.open("x", "w") as file:
        assert file.size == 0
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600


def test_a_missing_file(engine: Engine, tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        engine.open("nothing", "r+")
    assert isinstance(caught.value, MissingFileError)
    assert caught.value.path == str(tmp_path / "nothing")
    with pytest.raises(MissingFileError):
        engine.remove("nothing")


def test_a_missing_folder(lane: Lane, tmp_path: Path):
    with pytest.raises(MissingFileError):
        lane.open(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(SpillError):
        lane.open(tmp_path / "file")


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../x", "a/../../x", "", ".", "..", "a//b", "a\0b"]
)
def test_names_stay_in_the_folder(engine: Engine, name):
    with pytest.raises(UnsupportedError):
        engine.open(name, "w")


def test_links_are_not_followed(engine: Engine, tmp_path: Path):
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "x").write_bytes(b"precious")
    (tmp_path / "link").symlink_to(outside / "x")
    (tmp_path / "folder").symlink_to(outside)
    for name in ("link", "folder/x"):
        with pytest.raises(UnsupportedError, match="Links"):
            engine.open(name, "w")
    assert (outside / "x").read_bytes() == b"precious"


def test_files_in_subfolders(engine: Engine, tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    with engine.open("a/b/x", "w") as file:
        write(engine, file, random_bytes(10))
    assert (tmp_path / "a" / "b" / "x").stat().st_size == 10


@pytest.mark.parametrize(("mode", "size"), [("a", None), ("rb", None), ("r", 10), ("w", -1)])
def test_bad_modes(engine: Engine, mode, size):
    with pytest.raises(UnsupportedError):
        engine.open("x", mode, size)


def test_size_is_preallocated(engine: Engine, tmp_path: Path):
    with engine.open("x", "w", size=1 << 20) as file:
        assert file.size == 1 << 20
    assert (tmp_path / "x").stat().st_blocks * 512 >= 1 << 20
    with engine.open("x", "r+", size=10) as file:
        assert file.size == 1 << 20, "a smaller size does not cut the file"


def test_sync(engine: Engine):
    with engine.open("x", "w") as file:
        write(engine, file, random_bytes(10_000))
        file.sync()


def test_a_closed_file(engine: Engine, tmp_path: Path):
    file = engine.open("x", "w", size=10)
    file.close()
    file.close()
    assert file.closed
    for use in (
        lambda: engine.submit([Request(poisoned(10), file)]),
        lambda: file.size,
        file.sync,
    ):
        with pytest.raises(ClosedError) as caught:
            use()
        assert caught.value.path == str(tmp_path / "x")


def test_a_closed_engine(lane: Lane, tmp_path: Path):
    engine = lane.open(tmp_path)
    file = engine.open("x", "w", size=10)
    engine.submit([Request(random_bytes(10), file, write=True)]).result()
    engine.close()
    engine.close()
    assert file.closed
    assert engine.closed
    for use in (
        lambda: engine.open("x"),
        lambda: engine.submit([]),
        lambda: engine.prepare([]),
        lambda: engine.remove("x"),
    ):
        with pytest.raises(ClosedError):
            use()
    assert engine.statistics().bytes_written == 10


def test_a_file_of_another_engine(lane: Lane, tmp_path: Path):
    with lane.open(tmp_path) as one, lane.open(tmp_path) as other:
        file = one.open("x", "w", size=10)
        with pytest.raises(UnsupportedError, match="another engine"):
            other.submit([Request(poisoned(10), file)])


def test_descriptors_are_given_back(lane: Lane, tmp_path: Path):
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    with lane.open(tmp_path) as engine, engine.open("x", "w") as file:
        write(engine, file, random_bytes(10_000))
    before = descriptors()
    for _ in range(20):
        with lane.open(tmp_path) as engine, engine.open("x", "w") as file:
            write(engine, file, random_bytes(10_000))
    assert descriptors() == before
