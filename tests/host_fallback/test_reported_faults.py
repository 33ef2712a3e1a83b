"""What users reported of the swapper that this library replaces, and must not happen here.

Each test names a fault that was seen in its engine: results that nobody looked at, assertions that
ended the process, buffers handed out while the drive was still writing to them.
"""

import errno
import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorspill
from tensorspill.engine import Engine, Request
from tensorspill.errors import (
    BrokenError,
    BusyError,
    EndOfFileError,
    MissingFileError,
    NoSpaceError,
    UnsupportedError,
)
from tensorspill.pool import BufferPool
from tensorspill.pool.slab import Slab
from tests.conformance.data import poisoned, random_bytes, read, write
from tests.faults import (
    file_size_limit,
    in_child,
    kernel_setting,
    small_file_system,
    usable,
)

MIB = 1 << 20


def aio(folder: Path, **options: Any) -> Engine:
    return tensorspill.open_engine(folder, backend="aio", **options)


@pytest.fixture(params=["auto", "no"], ids=["direct", "page-cache"])
def direct(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


# -- completion results were ignored -------------------------------------------------------------


def test_no_success_for_32_mib_on_a_drive_of_8(tmp_path: Path, direct):
    with small_file_system(tmp_path, 8 * MIB) as folder, aio(folder, direct=direct) as engine:
        with engine.open("x", "w") as file:
            with pytest.raises(NoSpaceError) as caught:
                write(engine, file, random_bytes(32 * MIB))
            assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, file.path)
            assert engine.statistics().bytes_written == 0
            assert engine.statistics().failures == 1
        engine.remove("x")
        assert usable(engine)


def test_no_success_beyond_the_file_size_limit(tmp_path: Path, direct):
    with aio(tmp_path, direct=direct) as engine, engine.open("x", "w") as file:
        with file_size_limit(MIB), pytest.raises(NoSpaceError) as caught:
            write(engine, file, random_bytes(8 * MIB))
        assert (caught.value.errno, caught.value.path) == (errno.EFBIG, file.path)
        assert caught.value.offset is not None
        assert file.size <= MIB
        assert usable(engine)


@pytest.mark.parametrize("nbytes", [1, 511, 513, 1023, MIB - 1, MIB + 513])
def test_a_length_that_is_no_multiple_of_512_is_all_there(tmp_path: Path, direct, nbytes):
    content = random_bytes(nbytes)
    with aio(tmp_path, direct=direct) as engine, engine.open("x", "w") as file:
        write(engine, file, content)
    assert (tmp_path / "x").read_bytes() == content.numpy().tobytes()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn])
def test_file_and_tensor_have_the_same_size(tmp_path: Path, direct, dtype):
    tensor = torch.randn(1000, 77).to(dtype)
    with aio(tmp_path, direct=direct) as engine, engine.open("x", "w") as file:
        assert engine.submit([Request(tensor, file, write=True)]).result().nbytes == tensor.nbytes
        assert file.size == tensor.nbytes


# -- 1024 bytes were taken for aligned on drives with sectors of 4096 ----------------------------


def test_multiples_of_1024_on_sectors_of_4096(tmp_path: Path):
    with small_file_system(tmp_path, 8 * MIB, sector=4096) as folder, aio(folder) as engine:
        for nbytes in (1024, 5 * 1024, MIB + 3 * 1024):
            content = random_bytes(nbytes, 1024)
            with engine.open("x", "w") as file:
                write(engine, file, content)
                assert file.size == nbytes
                assert torch.equal(read(engine, file, nbytes), content)
            assert (folder / "x").stat().st_size == nbytes


# -- assertions ended the process ----------------------------------------------------------------


def test_a_short_file_ends_a_read_and_not_the_process(tmp_path: Path, direct):
    def short() -> None:
        (tmp_path / "x").write_bytes(os.urandom(10_000))
        with aio(tmp_path, direct=direct) as engine, engine.open("x") as file:
            with pytest.raises(EndOfFileError) as caught:
                read(engine, file, MIB)
            assert (caught.value.errno, caught.value.path) == (errno.ENODATA, file.path)
            assert usable(engine)

    in_child(short)


def test_waiting_with_nothing_pending(tmp_path: Path, direct):
    def nothing() -> None:
        engine = aio(tmp_path, direct=direct)
        file = engine.open("x", "w")
        assert engine.submit([]).result().nbytes == 0
        transfer = engine.submit([Request(random_bytes(5000), file, write=True)])
        for _ in range(3):
            assert transfer.result().nbytes == 5000
        for _ in range(2):
            file.close()
            engine.close()

    in_child(nothing)


def test_everything_dropped_while_transfers_are_pending(tmp_path: Path, direct):
    def dropped() -> None:
        content = random_bytes(16 * MIB)
        for i in range(3):
            engine = aio(tmp_path, direct=direct)
            file = engine.open(f"x{i}", "w")
            engine.submit([Request(content.clone(), file, write=True)])
            del engine, file
            gc.collect()
        for i in range(3):
            with aio(tmp_path) as engine, engine.open(f"x{i}") as file:
                # Collecting the engine has waited for its transfers.
                assert torch.equal(read(engine, file, 16 * MIB), content)

    in_child(dropped)


def test_memory_that_can_t_be_pinned(tmp_path: Path):
    if Path("/dev/nvidiactl").exists():
        pytest.skip("there is a driver to pin memory with")
    with pytest.raises(UnsupportedError):
        Slab(MIB, page_lock="yes")
    with BufferPool(MIB) as pool, aio(tmp_path) as engine, engine.open("x", "w") as file:
        buffer = pool.allocate(1000)
        write(engine, file, buffer.tensor)


def test_aio_requests_exhausted(tmp_path: Path):
    with kernel_setting("fs/aio-max-nr", 0):

        def exhausted() -> None:
            with aio(tmp_path) as engine:
                assert usable(engine)
                assert engine.statistics().notes

        in_child(exhausted)


def test_no_library_for_aio_is_needed(tmp_path: Path):
    with aio(tmp_path) as engine:
        assert usable(engine)
    assert "libaio" not in Path("/proc/self/maps").read_text()


# -- side effects inside assert ------------------------------------------------------------------


@pytest.mark.thorough
def test_input_and_output_happen_under_python_o(tmp_path: Path):
    script = """
        import sys, torch, tensorspill
        from tensorspill import Request
        with tensorspill.open_engine(sys.argv[1]) as engine, engine.open("x", "w") as file:
            content = torch.arange(100_000, dtype=torch.int32)
            engine.submit([Request(content, file, write=True)]).result()
            back = torch.zeros_like(content)
            engine.submit([Request(back, file)]).result()
            sys.exit(0 if torch.equal(back, content) and file.size == 400_000 else 3)
    """
    command = [sys.executable, "-O", "-c", textwrap.dedent(script), str(tmp_path)]
    assert subprocess.run(command, timeout=120, check=False).returncode == 0
    assert (tmp_path / "x").stat().st_size == 400_000


# -- buffers were released while a read was in flight --------------------------------------------


def test_no_buffer_is_handed_out_while_a_read_fills_it(tmp_path: Path, direct):
    nbytes = 32 * MIB
    content, other = random_bytes(nbytes), random_bytes(nbytes)
    with (
        aio(tmp_path, direct=direct) as engine,
        BufferPool(nbytes) as pool,
        engine.open("x", "w", size=nbytes) as file,
    ):
        write(engine, file, content)
        refused = 0
        for _ in range(10):
            buffer = pool.allocate(nbytes)
            transfer = engine.submit([Request(buffer, file)])
            try:
                buffer.release()
            except BusyError:
                refused += 1
                transfer.result()
                assert torch.equal(buffer.tensor, content)
                buffer.release()
            # It is somebody else's now, and nothing is written to it any more.
            following = pool.allocate(nbytes)
            following.tensor.copy_(other)
            transfer.result()
            assert torch.equal(following.tensor, other)
            following.release()
        assert refused, "every read was over before the release"


# -- a failed submit in a batch left counters out of step ----------------------------------------


def test_a_refused_batch_starts_nothing_and_the_next_is_fine(tmp_path: Path, direct):
    content = random_bytes(MIB)
    with aio(tmp_path, direct=direct) as engine, engine.open("x", "w", size=MIB) as file:
        write(engine, file, content)
        target = poisoned(MIB)
        before = engine.statistics()
        for _ in range(3):
            with pytest.raises(UnsupportedError):
                engine.submit([Request(target, file), Request(target, file, nbytes=2 * MIB)])
        after = engine.statistics()
        assert (after.transfers, after.in_flight) == (before.transfers, 0)
        assert bool((target == 0xA5).all())
        engine.submit([Request(target, file)]).result()
        assert torch.equal(target, content)


def test_a_failed_batch_leaves_unrelated_ones_alone(tmp_path: Path, direct):
    content = random_bytes(MIB)
    with aio(tmp_path, direct=direct) as engine, engine.open("x", "w") as file:
        write(engine, file, content)
        for _ in range(20):
            targets = [poisoned(MIB) for _ in range(3)]
            transfers = [
                engine.submit([Request(target, file, offset)])
                for target, offset in zip(targets, (0, 500_000, 0), strict=True)
            ]
            with pytest.raises(EndOfFileError):
                transfers[1].result()
            for i in (0, 2):
                transfers[i].result()
                assert torch.equal(targets[i], content)
        statistics = engine.statistics()
        assert (statistics.failures, statistics.in_flight) == (20, 0)
        assert statistics.bytes_read == 40 * MIB


# -- opening failed with neither path nor errno --------------------------------------------------


def test_an_error_of_opening_names_path_and_errno(tmp_path: Path, direct):
    (tmp_path / "folder").mkdir()
    with aio(tmp_path, direct=direct) as engine:
        cases = [("missing", "r+", errno.ENOENT), ("no/where", "w", errno.ENOENT)]
        for name, mode, code in [*cases, ("folder", "w", errno.EISDIR)]:
            with pytest.raises(BrokenError) as caught:
                engine.open(name, mode)
            assert (caught.value.errno, caught.value.path) == (code, str(tmp_path / name))
            assert os.strerror(code) in str(caught.value)
            assert str(tmp_path / name) in str(caught.value)
    with pytest.raises(MissingFileError, match="nothing"):
        aio(tmp_path / "nothing", direct=direct)
