"""Limits of the system: found, respected, and said in the statistics."""

import errno
import mmap
import os
import re
import resource
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorspill
from tensorspill.engine import Engine, Request
from tensorspill.errors import BrokenError, NoSpaceError, UnsupportedError
from tensorspill.host_fallback.abi import system_calls
from tensorspill.host_fallback.file import AioFile
from tests.conformance.data import random_bytes, read, write
from tests.faults import (
    address_space,
    descriptors,
    file_size_limit,
    in_child,
    kernel_setting,
    refuse_system_call,
    resource_limit,
    round_trip,
    small_file_system,
    usable,
    without_huge_pages,
)

MIB = 1 << 20


def aio(folder: Path, **options: Any) -> Engine:
    return tensorspill.open_engine(folder, backend="aio", **options)


def paths(engine: Engine) -> set[str]:
    return set(engine.statistics().by_path)


# -- AIO requests ------------------------------------------------------------------------------


def test_few_aio_requests_left(tmp_path: Path):
    with kernel_setting("fs/aio-max-nr", 10), aio(tmp_path) as engine:
        assert usable(engine)
        said = re.search(r"depth (\d+) of 32", " ".join(engine.statistics().notes))
        assert said is not None
        depth = int(said[1])
        # Other processes may use some of the ten.
        assert 0 <= depth <= 10
        assert ("direct" in paths(engine)) == (depth > 0)


def test_no_aio_request_left(tmp_path: Path):
    with kernel_setting("fs/aio-max-nr", 0), aio(tmp_path, threads=2) as engine:
        assert usable(engine)
        assert paths(engine) == {"buffered"}
        assert any("aio-max-nr" in note for note in engine.statistics().notes)
    with aio(tmp_path) as engine:
        assert usable(engine)
        assert not engine.statistics().notes


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOSYS])
@pytest.mark.parametrize("name", ["io_setup", "io_submit", "io_getevents"])
def test_aio_refused_by_a_sandbox(tmp_path: Path, name, code):
    def refused() -> None:
        refuse_system_call(getattr(system_calls(), name), code)
        with aio(tmp_path) as engine:
            assert usable(engine)
            assert paths(engine) == {"buffered"}
            assert any("not allowed" in note for note in engine.statistics().notes)

    in_child(refused)


def test_statx_refused_by_a_sandbox(tmp_path: Path):
    def refused() -> None:
        refuse_system_call(system_calls().statx, errno.ENOSYS)
        with aio(tmp_path) as engine:
            assert usable(engine)

    in_child(refused)


# -- resource limits -----------------------------------------------------------------------------


def test_no_memory_may_be_locked(tmp_path: Path):
    def limited() -> None:
        with aio(tmp_path) as engine, engine.open("x", "w", size=MIB) as file:
            if os.geteuid() == 0:
                os.seteuid(65534)  # root may lock what it likes
            content = random_bytes(MIB, 64)
            with resource_limit(resource.RLIMIT_MEMLOCK, 0):
                write(engine, file, content)
                assert torch.equal(read(engine, file, MIB), content)

    in_child(limited)


@pytest.mark.parametrize("spare", [0, 1])
def test_no_descriptor_left(tmp_path: Path, spare):
    with aio(tmp_path, direct="auto") as engine:
        with engine.open("kept", "w") as file:
            write(engine, file, random_bytes(5000))
        lowest = os.dup(0)
        os.close(lowest)
        before = descriptors()
        # A file that is there takes a second one only when something needs it.
        for name, mode in (("new", "w"), ("kept", "r+"))[: 2 - spare]:
            limit = resource_limit(resource.RLIMIT_NOFILE, lowest + spare)
            with limit, pytest.raises(BrokenError) as caught:
                engine.open(name, mode)
            assert caught.value.errno == errno.EMFILE
            assert caught.value.path == str(tmp_path / name)
            assert "ulimit -n" in str(caught.value)
        assert descriptors() == before
        assert not (tmp_path / "new").exists()
        assert (tmp_path / "kept").stat().st_size == 5000
        assert usable(engine)


def test_no_descriptor_left_for_the_page_cache(tmp_path: Path):
    content = random_bytes(5000)
    with aio(tmp_path, threads=2) as engine:
        with engine.open("x", "w") as file:
            write(engine, file, content)
        lowest = os.dup(0)
        os.close(lowest)
        before = descriptors()
        with engine.open("x", "r+") as file:
            assert isinstance(file, AioFile)
            if file.descriptors.buffered >= 0:
                pytest.skip("no direct I/O in the temporary folder")
            assert torch.equal(read(engine, file, 5000), content)
            assert descriptors() == before + 1
            with (
                resource_limit(resource.RLIMIT_NOFILE, lowest + 1),
                pytest.raises(BrokenError) as caught,
            ):
                write(engine, file, content.flip(0))
            assert caught.value.errno == errno.EMFILE
            assert (caught.value.path, caught.value.nbytes) == (str(tmp_path / "x"), 904)
            for shift in (0, 1, 2):
                write(engine, file, content, shift)
                assert torch.equal(read(engine, file, 5000, shift), content)
            assert descriptors() == before + 2
        assert descriptors() == before


def test_a_file_that_was_renamed_is_opened_again(tmp_path: Path):
    """For the page cache; by the descriptor that there is, not by its name."""
    content = random_bytes(5000)
    (tmp_path / "x").write_bytes(bytes(5000))
    with aio(tmp_path) as engine, engine.open("x", "r+") as file:
        (tmp_path / "x").rename(tmp_path / "y")
        (tmp_path / "x").write_bytes(b"another")
        write(engine, file, content)
        assert (tmp_path / "y").read_bytes() == bytes(content.numpy())
        assert (tmp_path / "x").read_bytes() == b"another"
        (tmp_path / "y").unlink()
        write(engine, file, content.flip(0), 1)
        assert torch.equal(read(engine, file, 5000, 1), content.flip(0))


def test_no_descriptor_left_for_an_engine(tmp_path: Path):
    lowest = os.dup(0)
    os.close(lowest)
    with (
        resource_limit(resource.RLIMIT_NOFILE, lowest),
        pytest.raises(BrokenError) as caught,
    ):
        aio(tmp_path)
    assert (caught.value.errno, caught.value.path) == (errno.EMFILE, str(tmp_path))


def test_preallocating_beyond_the_file_size_limit(tmp_path: Path):
    with aio(tmp_path) as engine:
        with engine.open("kept", "w") as file:
            write(engine, file, random_bytes(5000))
        for name, mode in (("new", "w"), ("kept", "r+")):
            with file_size_limit(100_000), pytest.raises(NoSpaceError) as caught:
                engine.open(name, mode, size=MIB)
            assert caught.value.errno == errno.EFBIG
            assert caught.value.path == str(tmp_path / name)
            assert caught.value.asked == MIB
        assert not (tmp_path / "new").exists()
        assert (tmp_path / "kept").stat().st_size == 5000
        assert usable(engine)


@pytest.mark.parametrize("room", [0, 12])
def test_no_address_space_for_staging(tmp_path: Path, room):
    def limited() -> None:
        content = random_bytes(8 * MIB, 3)
        with aio(tmp_path, block_bytes=4 * MIB) as engine, engine.open("x", "w") as file:
            write(engine, file, random_bytes(MIB))  # starts the thread
            with address_space(room * MIB):
                record = engine.submit([Request(content, file, write=True)]).result(30)
            assert set(record.by_path) == {"staged" if room else "buffered"}
            assert torch.equal(read(engine, file, 8 * MIB), content)
            assert any("staging" in note for note in engine.statistics().notes)
            assert usable(engine)

    in_child(limited)


def test_no_address_space_for_a_thread(tmp_path: Path):
    def limited() -> None:
        content = random_bytes(MIB)
        with aio(tmp_path, threads=3) as engine, engine.open("x", "w") as file:
            threading.stack_size(1 << 30)
            for _ in range(2):
                with address_space(256 * MIB), pytest.raises(BrokenError) as caught:
                    engine.submit([Request(content, file, write=True)])
                assert caught.value.errno == errno.EAGAIN
            threading.stack_size(0)
            statistics = engine.statistics()
            assert (statistics.failures, statistics.in_flight) == (2, 0)
            assert usable(engine)

    in_child(limited)


def test_no_huge_pages(tmp_path: Path):
    def without() -> None:
        without_huge_pages()
        with aio(tmp_path) as engine:
            assert usable(engine)
            assert "staged" in paths(engine)

    in_child(without)


# -- large numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "block"), [(4096, MIB), (4, 1 << 30)])
def test_depth_times_block_beyond_two_gib(tmp_path: Path, depth, block):
    offset = (1 << 31) - 5 * MIB
    with aio(tmp_path, depth=depth, block_bytes=block) as engine:
        for shift in (0, 1):
            assert round_trip(engine, "x", 20 * MIB, shift, offset)
        assert {"direct", "staged"} <= paths(engine)


def test_a_request_beyond_two_gib(tmp_path: Path):
    nbytes = (1 << 31) + 3 * MIB
    if os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE < 2 * nbytes:
        pytest.skip("needs 4 GiB of free memory")
    pages = {offset: random_bytes(4096) for offset in (0, 1 << 31, (1 << 31) - 4096, nbytes - 4096)}
    # The file is mostly a hole, which costs the drive nothing.
    target = np.frombuffer(mmap.mmap(-1, nbytes), "u1")
    with aio(tmp_path) as engine, engine.open("x", "w") as file:
        for offset, page in pages.items():
            write(engine, file, page, offset)
        assert file.size == nbytes
        record = engine.submit([Request(target, file)]).result()
        assert record.nbytes == nbytes
    for offset, page in pages.items():
        assert np.array_equal(target[offset : offset + 4096], page.numpy())


@pytest.mark.parametrize("direct", ["auto", "no"])
@pytest.mark.parametrize("at", [1 << 32, 1 << 41, (1 << 43) + 12_345])
def test_files_beyond_two_tib(tmp_path: Path, at, direct):
    content = random_bytes(3 * MIB, 64)
    with aio(tmp_path, direct=direct) as engine, engine.open("x", "w") as file:
        try:
            os.truncate(file.path, at + 4 * MIB)
        except OSError as error:
            pytest.skip(f"no file of {at} bytes here: {error.strerror}")
        os.truncate(file.path, 0)
        for offset in (at, at - 1_000_001):
            write(engine, file, content, offset)
            assert torch.equal(read(engine, file, 3 * MIB, offset), content)
        assert file.size == at + 3 * MIB


def test_files_larger_than_the_file_system_allows(tmp_path: Path):
    with aio(tmp_path) as engine, engine.open("x", "w") as file:
        with pytest.raises(BrokenError) as caught:
            write(engine, file, random_bytes(MIB), (1 << 62) - 2 * MIB)
        assert caught.value.errno in (errno.EFBIG, errno.EINVAL)
        assert caught.value.path == file.path
        assert caught.value.offset is not None
        assert caught.value.offset >= (1 << 62) - 2 * MIB
        for offset in ((1 << 62) - 1, (1 << 63) - 1, 1 << 63, 1 << 70):
            with pytest.raises(UnsupportedError):
                write(engine, file, random_bytes(MIB), offset)
        assert usable(engine)
    with small_file_system(tmp_path, 8 << 20) as folder, aio(folder) as engine:
        with engine.open("x", "w") as file, pytest.raises(NoSpaceError) as refused:
            write(engine, file, random_bytes(MIB), 1 << 50)
        assert refused.value.errno == errno.EFBIG
        assert usable(engine)
