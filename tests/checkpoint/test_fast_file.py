"""`FastFile`: the ordinary format, durable, and the old file until the new one is whole."""

import errno
import io
import os
import pickle
import random
import signal
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorspill.checkpoint.fast_file import FastFile
from tensorspill.errors import (
    BrokenError,
    ClosedError,
    MissingFileError,
    NoSpaceError,
    UnsupportedError,
)
from tests.checkpoint.files.helpers import fresh, same
from tests.faults.checks import descriptors
from tests.faults.child import start_child
from tests.faults.file_systems import small_file_system
from tests.faults.fuse import faulty_file_system
from tests.faulty_drive.rules import Rule
from tests.thorough import examples

SMALL: dict[str, Any] = {"buffer_bytes": 8192, "buffers": 3}


def state():
    shared = fresh((300, 200))
    return {
        "large": fresh((1500, 1000)),
        "tensors": [fresh((i,), torch.bfloat16) for i in range(30)],
        "strided": fresh((300, 100)).t(),
        "shared": shared,
        "view": shared[10:20],
        "text": "x" * 1000,
        "number": 3,
    }


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return same(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


@pytest.mark.parametrize("options", [{}, SMALL, {"direct": "no"}], ids=["", "small", "buffered"])
def test_torch_saves_and_loads_the_ordinary_format(tmp_path, options):
    content, path = state(), tmp_path / "a.pt"
    with FastFile(path, "w", **options) as file:
        torch.save(content, file)
    plain = io.BytesIO()
    torch.save(content, plain)
    torch.save(content, tmp_path / "plain.pt")
    assert os.path.getsize(path) == len(plain.getvalue())
    assert equal(torch.load(path, weights_only=True), content)
    for name in ("a.pt", "plain.pt"):
        with FastFile(tmp_path / name, **options) as file:
            back = torch.load(file, mmap=False, weights_only=True)
        assert equal(back, content)
        assert back["view"].data_ptr() - back["shared"].data_ptr() == 10 * 200 * 4


def test_the_old_format_and_other_libraries(tmp_path):
    content = state()
    with FastFile(tmp_path / "old", "wb") as file:
        torch.save(content, file, _use_new_zipfile_serialization=False)
    with FastFile(tmp_path / "old", "rb") as file:
        assert equal(torch.load(file, weights_only=True), content)
    with FastFile(tmp_path / "p", "w", **SMALL) as file:
        pickle.dump({"a": b"x" * 100_000}, file)
    with FastFile(tmp_path / "p", **SMALL) as file:
        assert pickle.load(file) == {"a": b"x" * 100_000}
    array = np.random.default_rng().random((300, 70))
    with FastFile(tmp_path / "n", "w") as file:
        np.save(file, array)
    with FastFile(tmp_path / "n") as file:
        assert np.array_equal(np.load(file), array)


@given(st.lists(st.integers(0, 40_000), max_size=12))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_pieces_of_any_size(tmp_path, sizes):
    pieces = [os.urandom(size) for size in sizes]
    with FastFile(tmp_path / "a", "w", **SMALL) as file:
        for piece in pieces:
            before = file.tell()
            assert file.write(piece) == len(piece)
            assert file.tell() == before + len(piece)
    assert (tmp_path / "a").read_bytes() == b"".join(pieces)


@given(st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(40))
def test_it_reads_like_any_other_file(tmp_path, data):
    path = tmp_path / "a"
    size = data.draw(st.sampled_from([0, 1, 8191, 8192, 100_001]))
    # Where lines end decides what is drawn next, so it must not differ between runs.
    path.write_bytes(random.Random(data.draw(st.integers(0, 9))).randbytes(size))
    with FastFile(path, **SMALL) as ours, path.open("rb") as theirs:
        for _ in range(data.draw(st.integers(1, 12))):
            match data.draw(st.sampled_from(["read", "readinto", "seek", "line", "peek", "tell"])):
                case "read":
                    count = data.draw(st.sampled_from([0, 1, 30, 5000, 8192, 30_000, -1, None]))
                    assert ours.read(count) == theirs.read(count)
                case "readinto":
                    count = data.draw(st.integers(0, 50_000))
                    a, b = bytearray(count), bytearray(count)
                    assert ours.readinto(a) == theirs.readinto(b)
                    assert a == b
                case "seek":
                    whence = data.draw(st.sampled_from([os.SEEK_SET, os.SEEK_CUR, os.SEEK_END]))
                    base = {0: 0, 1: theirs.tell(), 2: size}[whence]
                    place = data.draw(st.integers(-base, size + 10 - base))
                    assert ours.seek(place, whence) == theirs.seek(place, whence)
                case "line":
                    limit = data.draw(st.sampled_from([-1, 0, 7, 5000]))
                    assert ours.readline(limit) == theirs.readline(limit)
                case "peek":
                    found = ours.peek(10)
                    here = theirs.tell()
                    assert found[:10] == theirs.read(10)
                    theirs.seek(here)
                case "tell":
                    assert ours.tell() == theirs.tell()


def test_lines(tmp_path):
    (tmp_path / "a").write_bytes(b"one\ntwo\n\nlast")
    with FastFile(tmp_path / "a") as file:
        assert list(file) == [b"one\n", b"two\n", b"\n", b"last"]


def test_what_is_written_may_change_at_once(tmp_path):
    data = np.zeros(20_000, np.uint8)
    with FastFile(tmp_path / "a", "w", **SMALL) as file:
        for value in range(10):
            data[:] = value
            file.write(data)
            data[:] = 255
    assert (tmp_path / "a").read_bytes() == b"".join(bytes([v]) * 20_000 for v in range(10))


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")

    def fail(file):
        file.write(b"new" * 10_000)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), FastFile(path, "w", **SMALL) as file:
        fail(file)
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a"]
    file = FastFile(path, "w")
    file.write(b"new")
    assert path.read_bytes() == b"old"
    file.close()
    file.close()
    assert path.read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["a"]


def test_killed_while_it_is_written(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(b"old")
    FastFile(tmp_path / "warm", "w").close()

    def die():
        file = FastFile(path, "w", **SMALL)
        file.write(bytes(100_000))
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError):
        start_child(die).result()
    assert path.read_bytes() == b"old"
    (leftover,) = (p for p in tmp_path.iterdir() if p.name.endswith(".saving"))
    under_way = FastFile(path, "w")
    assert leftover.exists()
    for file in tmp_path.glob(".*.saving"):
        os.utime(file, (0, 0))
    FastFile(path, "w").abandon()
    assert not leftover.exists()
    under_way.write(b"new")
    under_way.close()
    assert path.read_bytes() == b"new"


def test_modes(tmp_path):
    with pytest.raises(MissingFileError):
        FastFile(tmp_path / "none")
    with pytest.raises(MissingFileError):
        FastFile(tmp_path / "none" / "a", "w")
    for mode in ("a", "r+", "", "wr"):
        with pytest.raises(UnsupportedError):
            FastFile(tmp_path / "a", mode)
    for options in ({"buffers": 1}, {"buffer_bytes": 1000}, {"buffer_bytes": 0}):
        with pytest.raises(UnsupportedError):
            FastFile(tmp_path / "a", "w", **options)
    with FastFile(tmp_path / "a", "x") as file:
        file.write(b"1")
        assert file.writable()
        assert not file.readable()
        for call in (file.read, file.readline, lambda: file.readinto(bytearray(1))):
            with pytest.raises(UnsupportedError):
                call()
        with pytest.raises(UnsupportedError):
            file.seek(0)
        assert file.seek(0, os.SEEK_CUR) == 1
    with pytest.raises(BrokenError) as caught:
        FastFile(tmp_path / "a", "x")
    assert caught.value.errno == errno.EEXIST
    with FastFile(tmp_path / "lines", "w") as file:
        file.writelines([b"a\n", b"b\n"])
        assert not file.isatty()
        for refused in (file.truncate, file.fileno):
            with pytest.raises(io.UnsupportedOperation):
                refused()
    with FastFile(tmp_path / "lines") as file:
        assert file.readlines() == [b"a\n", b"b\n"]
    with FastFile(tmp_path / "a") as file:
        assert file.readable()
        assert file.seekable()
        with pytest.raises(UnsupportedError):
            file.write(b"1")
        with pytest.raises(UnsupportedError):
            file.seek(-1)
    for call in (file.read, file.tell, lambda: file.seek(0)):
        with pytest.raises(ClosedError):
            call()


def test_x_does_not_replace_what_came_meanwhile(tmp_path):
    file = FastFile(tmp_path / "a", "x")
    file.write(b"ours")
    (tmp_path / "a").write_bytes(b"theirs")
    with pytest.raises(BrokenError):
        file.close()
    assert (tmp_path / "a").read_bytes() == b"theirs"
    assert os.listdir(tmp_path) == ["a"]


def write_blocks(file, nbytes, count):
    with file:
        for _ in range(count):
            file.write(bytes(nbytes))


def test_a_full_file_system(tmp_path):
    with small_file_system(tmp_path, 16 << 20) as folder:
        before = descriptors()
        file = FastFile(folder / "a", "w", buffer_bytes=1 << 20)
        with pytest.raises(NoSpaceError):
            write_blocks(file, 1 << 20, 40)
        assert file.closed
        assert descriptors() == before
        assert "a" not in os.listdir(folder)
        with FastFile(folder / "b", "w") as file:
            file.write(bytes(8 << 20))


@pytest.mark.parametrize("op", ["write", "fsync"])
def test_a_drive_that_fails_to_write(tmp_path, op):
    with faulty_file_system(tmp_path) as files:
        (files.folder / "a").write_bytes(b"old")
        files.rules(Rule(op=op, begin=1 << 20, error=errno.EIO))
        before = descriptors()
        file = FastFile(files.folder / "a", "w", buffer_bytes=1 << 18)
        with pytest.raises(BrokenError) as caught:
            write_blocks(file, 1 << 18, 16)
        assert caught.value.errno == errno.EIO
        assert descriptors() == before
        files.rules()
        assert (files.folder / "a").read_bytes() == b"old"
        assert os.listdir(files.folder) == ["a"]


def test_a_drive_that_fails_to_read(tmp_path):
    with faulty_file_system(tmp_path) as files:
        data = os.urandom(1 << 20)
        (files.folder / "a").write_bytes(data)
        files.rules(Rule(op="read", begin=1 << 19, error=errno.EIO))
        with FastFile(files.folder / "a", **SMALL) as file:
            # What was read ahead and failed is nobody's business before it is asked for.
            assert file.read((1 << 19) - 8192) == data[: (1 << 19) - 8192]
            with pytest.raises(BrokenError):
                file.read()
            file.seek(0)
            assert file.read(100) == data[:100]


def test_dropped_without_close(tmp_path):
    file = FastFile(tmp_path / "a", "w")
    file.write(b"1")
    del file
    assert not (tmp_path / "a").exists()
