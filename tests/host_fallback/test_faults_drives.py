"""A drive that fails, falls short, refuses or does not answer; a file system that fails on demand.

See `tests.faults.fuse`.
"""

import errno
import fnmatch
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pytest
import torch

import tensorspill
from tensorspill.engine import Engine, Request
from tensorspill.errors import BrokenError, EndOfFileError, NoSpaceError
from tests.conformance.data import guards_intact, poisoned, random_bytes, read, write
from tests.faults import FaultyFileSystem, Rule, faulty_file_system, usable

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFileSystem]:
    with faulty_file_system(tmp_path_factory.mktemp("fuse")) as files:
        yield files


@pytest.fixture
def drive(mounted: FaultyFileSystem) -> Iterator[FaultyFileSystem]:
    yield mounted
    mounted.rules()
    # Not behind its back: the kernel would go on believing in them.
    for path in mounted.folder.iterdir():
        path.unlink()


@pytest.fixture(params=["auto", "no"], ids=["direct", "page-cache"])
def engine(request: pytest.FixtureRequest, drive: FaultyFileSystem) -> Iterator[Engine]:
    with aio(drive.folder, direct=request.param) as opened:
        yield opened
        drive.rules()


def aio(folder: Path, **options: Any) -> Engine:
    return tensorspill.open_engine(folder, backend="aio", **{"block_bytes": 64 * KIB} | options)


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("write_", [False, True], ids=["read", "write"])
@pytest.mark.parametrize("code", [errno.EIO, errno.EREMOTEIO, errno.ETIMEDOUT])
def test_an_error_names_path_place_and_errno(engine: Engine, drive, code, write_, shift):
    content = random_bytes(MIB, shift)
    with engine.open("bad", "w", size=MIB) as file:
        write(engine, file, content)
        drive.rules(
            Rule("bad", "write" if write_ else "read", begin=500_000, error=code),
        )
        buffer = content if write_ else poisoned(MIB, shift)
        with pytest.raises(BrokenError) as caught:
            engine.submit([Request(buffer, file, write=write_)]).result()
        error = caught.value
        assert isinstance(error, OSError)
        assert (error.errno, error.path) == (code, file.path)
        assert error.offset is not None
        assert error.nbytes
        # Of the callers' bytes, and at most a block from where the drive failed.
        assert 500_000 - 64 * KIB < error.offset < MIB
        assert error.offset + error.nbytes <= MIB
        assert ("Write" if write_ else "Read") in str(error)
        if not write_:
            assert guards_intact(buffer)
        drive.rules()
        assert torch.equal(read(engine, file, MIB), content)
    assert engine.statistics().failures == 1
    assert usable(engine)


def test_a_drive_that_is_full(engine: Engine, drive):
    drive.rules(Rule("big", "write", begin=300_000, error=errno.ENOSPC))
    content = random_bytes(MIB)
    with engine.open("big", "w") as file:
        with pytest.raises(NoSpaceError) as caught:
            write(engine, file, content)
        assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, file.path)
        # Byte 300,000 is the first for which there is no room: nothing beyond it is reported.
        assert caught.value.offset is not None
        assert caught.value.offset + 64 * KIB >= 300_000
        write(engine, file, content[:300_000])
        assert torch.equal(read(engine, file, 300_000), content[:300_000])
    assert usable(engine)


def test_a_full_drive_while_preallocating(engine: Engine, drive):
    drive.rules(Rule("big", "fallocate", error=errno.ENOSPC))
    with pytest.raises(NoSpaceError) as caught:
        engine.open("big", "w", size=MIB)
    assert (caught.value.errno, caught.value.asked) == (errno.ENOSPC, MIB)
    assert not (drive.folder / "big").exists()
    assert usable(engine)


def test_a_file_that_can_t_be_opened(engine: Engine, drive):
    drive.rules(Rule("x", "open", error=errno.EIO))
    for mode in ("w", "x"):
        with pytest.raises(BrokenError) as caught:
            engine.open("x", mode)
        assert (caught.value.errno, caught.value.path) == (errno.EIO, str(drive.folder / "x"))
    assert usable(engine)


def test_a_drive_that_can_t_keep_what_was_written(engine: Engine, drive):
    with engine.open("x", "w") as file:
        write(engine, file, random_bytes(10_000))
        drive.rules(Rule("x", "fsync", error=errno.EIO))
        with pytest.raises(BrokenError) as caught:
            file.sync()
        assert (caught.value.errno, caught.value.path) == (errno.EIO, file.path)
        drive.rules()
        file.sync()


def test_every_file_of_a_batch_may_fail_but_the_first_error_counts(engine: Engine, drive):
    drive.rules(Rule("bad*", "write", error=errno.EIO))
    names = ["good0", "bad1", "good2", "bad3"]
    files = [engine.open(name, "w") for name in names]
    content = random_bytes(200_000)
    with pytest.raises(BrokenError) as caught:
        engine.submit([Request(content, file, write=True) for file in files]).result()
    assert caught.value.path is not None
    assert fnmatch.fnmatch(os.path.basename(caught.value.path), "bad*")
    for file in files:
        file.close()
    assert usable(engine)


# -- short and refused operations --------------------------------------------------------------


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyFileSystem]:
    with faulty_file_system(tmp_path_factory.mktemp("synchronous"), synchronous=True) as files:
        yield files


@pytest.mark.parametrize("direct", ["auto", "no"])
@pytest.mark.parametrize("shorten", [1, 511, 4096, 5000, 40_000])
@pytest.mark.parametrize("shift", [0, 3])
def test_operations_that_fall_short_are_gone_on_with(synchronous, direct, shift, shorten):
    # One byte at a time is for few bytes.
    nbytes = 300_001 if shorten > 1 else 301
    content, back, offset = random_bytes(nbytes, shift), poisoned(nbytes, shift), 1000
    synchronous.rules(Rule(op="write", shorten=shorten), Rule(op="read", shorten=shorten))
    with aio(synchronous.folder, direct=direct) as engine:
        with engine.open("x", "w") as file:
            write(engine, file, content, offset)
            record = engine.submit([Request(back, file, offset)]).result()
        assert record.nbytes == nbytes == sum(record.by_path.values())
        assert torch.equal(back, content)
        assert guards_intact(back)
        assert (synchronous.behind / "x").read_bytes()[offset:] == content.numpy().tobytes()
        synchronous.rules()
        engine.remove("x")


def _neighbours(file, way: bool) -> tuple[list[torch.Tensor], list[Request]]:
    """Return tensors of whole pages that lie one behind another in the file, and requests."""
    pages = [33, 47, 40, 35]
    make = random_bytes if way else poisoned
    tensors = [make(count * 4 * KIB) for count in pages]
    offsets = [sum(pages[:i]) * 4 * KIB for i in range(len(pages))]
    return tensors, [
        Request(tensor, file, offset, write=way)
        for tensor, offset in zip(tensors, offsets, strict=True)
    ]


@pytest.mark.parametrize("shorten", [4096, 5000, 40_000, 200_000])
def test_operations_of_several_tensors_that_fall_short(synchronous, shorten):
    synchronous.rules(Rule(op="write", shorten=shorten), Rule(op="read", shorten=shorten))
    with aio(synchronous.folder, block_bytes=MIB) as engine:
        with engine.open("x", "w") as file:
            contents, requests = _neighbours(file, True)
            engine.submit(requests).result()
            back, requests = _neighbours(file, False)
            engine.submit(requests).result()
        assert all(map(torch.equal, back, contents))
        assert all(map(guards_intact, back))
        whole = torch.cat(contents).numpy().tobytes()
        assert (synchronous.behind / "x").read_bytes() == whole
        synchronous.rules()
        engine.remove("x")


def test_operations_of_several_tensors_that_are_refused(drive):
    with aio(drive.folder, block_bytes=MIB) as engine, engine.open("x", "w", size=MIB) as file:
        drive.rules(
            Rule(op="write", direct=True, error=errno.EINVAL),
            Rule(op="read", direct=True, error=errno.EINVAL),
        )
        contents, requests = _neighbours(file, True)
        record = engine.submit(requests).result()
        assert dict(record.by_path) == {"refused": record.nbytes}
        back, requests = _neighbours(file, False)
        engine.submit(requests).result()
    assert all(map(torch.equal, back, contents))
    assert all(map(guards_intact, back))


@pytest.mark.parametrize("shorten", [511, 4096, 40_000])
def test_asynchronous_reads_that_fall_short(engine: Engine, drive, shorten):
    content, back = random_bytes(300_001), poisoned(300_001)
    with engine.open("x", "w") as file:
        write(engine, file, content)
        drive.rules(Rule("x", "read", shorten=shorten))
        engine.submit([Request(back, file)]).result()
    assert torch.equal(back, content)
    assert guards_intact(back)


def test_an_asynchronous_write_that_falls_short_is_no_success(engine: Engine, drive):
    content = random_bytes(MIB)
    with engine.open("x", "w", size=MIB) as file:
        drive.rules(Rule("x", "write", shorten=40_000))
        error = engine.submit([Request(content, file, write=True)]).exception()
        if error is None:
            assert torch.equal(read(engine, file, MIB), content)
        else:
            assert isinstance(error, BrokenError)
            assert (error.errno, error.path) == (errno.EIO, file.path)
    drive.rules()
    assert usable(engine)


def test_direct_operations_that_are_refused(drive):
    """The alignment that was found may be wrong: each refused block goes through the page cache."""
    content = random_bytes(MIB)
    with aio(drive.folder) as engine, engine.open("x", "w", size=MIB) as file:
        drive.rules(
            Rule(op="write", direct=True, error=errno.EINVAL),
            Rule(op="read", direct=True, error=errno.EOPNOTSUPP),
        )
        record = engine.submit([Request(content, file, write=True)]).result()
        assert dict(record.by_path) == {"refused": MIB}
        assert torch.equal(read(engine, file, MIB), content)
        assert "refused" in engine.statistics().by_path["refused"].why
        drive.rules()
        record = engine.submit([Request(content, file, write=True)]).result()
        assert dict(record.by_path) == {"direct": MIB}


@pytest.mark.parametrize("multiple", [1024, 4096, 16_384])
def test_an_alignment_that_only_the_drive_knows(drive, multiple):
    drive.rules(
        Rule(op="write", direct=True, multiple=multiple),
        Rule(op="read", direct=True, multiple=multiple),
    )
    (drive.behind / "x").write_bytes(bytes(MIB))  # long enough to be probed
    with aio(drive.folder) as engine, engine.open("x", "r+") as file:
        for shift, offset, nbytes in ((0, 0, MIB), (3, 1000, 333_333), (512, 512, 1024)):
            content = random_bytes(nbytes, shift)
            write(engine, file, content, offset)
            assert torch.equal(read(engine, file, nbytes, offset), content)


def test_refused_and_failing_as_well(drive):
    with aio(drive.folder) as engine, engine.open("x", "w", size=MIB) as file:
        drive.rules(
            Rule(op="read", direct=True, error=errno.EINVAL), Rule(op="read", error=errno.EIO)
        )
        with pytest.raises(BrokenError) as caught:
            read(engine, file, MIB)
        assert (caught.value.errno, caught.value.path) == (errno.EIO, file.path)
        drive.rules()
        assert usable(engine)


def test_a_file_that_shrinks_while_it_is_read(engine: Engine, drive):
    content = random_bytes(4 * MIB)
    with engine.open("x", "w") as file:
        write(engine, file, content)
        for size in (3 * MIB, 2 * MIB + 1, 5000, 0):
            drive.rules(Rule("x", "read", begin=size, stall=True))
            target = poisoned(4 * MIB)
            transfer = engine.submit([Request(target, file)])
            drive.wait_for_stall()
            os.truncate(drive.behind / "x", size)
            drive.rules()
            with pytest.raises(EndOfFileError) as caught:
                transfer.result(30)
            assert (caught.value.errno, caught.value.path) == (errno.ENODATA, file.path)
            assert guards_intact(target)
    assert usable(engine)


# -- no answer -----------------------------------------------------------------------------------


@pytest.fixture
def stalled(drive: FaultyFileSystem) -> Iterator[tuple[Engine, Any, Any]]:
    """An engine whose drive does not answer for one of its files."""
    with aio(drive.folder) as engine:
        file = engine.open("stuck", "w", size=MIB)
        write(engine, file, random_bytes(MIB))
        drive.rules(Rule("stuck", "read", begin=900_000, stall=True))
        transfer = engine.submit([Request(poisoned(MIB), file)])
        drive.wait_for_stall()
        try:
            yield engine, file, transfer
        finally:
            drive.rules()


def test_other_files_go_on_while_one_is_stalled(stalled, drive, tmp_path: Path):
    engine, _, transfer = stalled
    with engine.open("other", "w", size=MIB) as file:
        content = random_bytes(MIB)
        write(engine, file, content)
        assert torch.equal(read(engine, file, MIB), content)
    with aio(tmp_path) as elsewhere:
        assert usable(elsewhere)
    assert not transfer.done()
    assert engine.statistics().in_flight == 1
    drive.rules()
    assert transfer.result(30).nbytes == MIB


def test_close_waits_for_a_stalled_file(stalled, drive):
    engine, _, transfer = stalled
    closing = threading.Thread(target=engine.close)
    closing.start()
    closing.join(0.1)
    assert closing.is_alive()
    drive.rules()
    closing.join(30)
    assert not closing.is_alive()
    assert transfer.result(0).nbytes == MIB


def test_cancelling_waits_for_what_the_drive_has(stalled, drive):
    _, _, transfer = stalled
    transfer.cancel()
    with pytest.raises(TimeoutError):
        transfer.result(0.05)
    drive.rules()
    try:
        assert transfer.result(30).nbytes == MIB
    except CancelledError:
        assert transfer.cancelled()


class InterruptError(Exception):
    """What a handler raises, as Ctrl-C's does."""


@pytest.fixture
def interrupting() -> Iterator[None]:
    """An alarm that raises."""

    def handler(*_: object) -> None:
        raise InterruptError

    before = signal.signal(signal.SIGALRM, handler)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("what", ["result", "file.close", "engine.close"])
def test_an_interrupt_is_taken_while_the_drive_does_not_answer(stalled, drive, interrupting, what):
    engine, file, transfer = stalled
    waits = {"result": transfer.result, "file.close": file.close, "engine.close": engine.close}
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    with pytest.raises(InterruptError):
        waits[what]()
    assert not transfer.done()
    drive.rules()
    # Nothing was left half-done: the same call finishes the work.
    waits[what]()
    assert transfer.result(30).nbytes == MIB


# -- the file system goes away ---------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["auto", "no"])
def test_a_drive_that_is_gone(tmp_path: Path, direct):
    with faulty_file_system(tmp_path) as drive:
        engine = aio(drive.folder, direct=direct)
        file = engine.open("x", "w", size=MIB)
        write(engine, file, random_bytes(MIB))
        drive.rules(Rule("x", "read", stall=True))
        waiting = engine.submit([Request(poisoned(MIB), file)])
        drive.wait_for_stall()
        drive.kill()
        gone = {errno.ENOTCONN, errno.ECONNABORTED, errno.EIO}
        for transfer in (waiting, engine.submit([Request(poisoned(MIB), file)])):
            with pytest.raises(BrokenError) as caught:
                transfer.result(30)
            assert caught.value.errno in gone
            assert caught.value.path == file.path
        with pytest.raises(BrokenError) as caught:
            engine.open("x", "r")
        assert caught.value.errno in gone
        engine.close()
    with aio(tmp_path) as elsewhere:
        assert usable(elsewhere)


def test_a_drive_that_slows_down_in_the_middle(engine: Engine, drive):
    """Nothing is lost, and the statistics show the slowest operation."""
    content = random_bytes(MIB)
    with engine.open("x", "w", size=MIB) as file:
        write(engine, file, content)
        before = max(path.slowest for path in engine.statistics().by_path.values())
        drive.rules(Rule("x", "write", begin=MIB // 2, stall=True))
        transfer = engine.submit([Request(content, file, write=True)])
        drive.wait_for_stall()
        time.sleep(before + 0.2)
        assert not transfer.done()
        drive.rules()
        transfer.result(60)
        assert torch.equal(read(engine, file, MIB), content)
    slowest = max(path.slowest for path in engine.statistics().by_path.values())
    assert slowest >= before + 0.2
