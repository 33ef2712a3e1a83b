"""Signals, forks, sudden ends, and file systems that go away in the middle of transfers."""

import errno
import functools
import mmap
import os
import random
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tensorspill
from tensorspill.engine import Engine, Request
from tensorspill.errors import EndOfFileError
from tensorspill.pool.live import live_ranges
from tests.conformance.data import poisoned, random_bytes, read, write
from tests.faults import in_child, small_file_system, start_child, usable

MIB = 1 << 20


def aio(folder: Path, **options: Any) -> Engine:
    return tensorspill.open_engine(folder, backend="aio", **options)


# -- signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize("direct", ["auto", "no"])
def test_a_storm_of_signals(tmp_path: Path, direct):
    def storm() -> int:
        count = 0

        def handler(*_: object) -> None:
            nonlocal count
            count += 1

        signal.signal(signal.SIGALRM, handler)
        signal.siginterrupt(signal.SIGALRM, True)  # system calls are interrupted, not restarted
        contents = [random_bytes(3 * MIB, shift) for shift in (0, 3)]
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        deadline = time.monotonic() + 60
        with aio(tmp_path, direct=direct, block_bytes=64 << 10) as engine:
            while count < 300:
                assert time.monotonic() < deadline, f"only {count} signals"
                with engine.open("x", "w", size=8 * MIB) as file:
                    for content in contents:
                        write(engine, file, content, 1000)
                        assert torch.equal(read(engine, file, 3 * MIB, 1000), content)
                    file.sync()
        signal.setitimer(signal.ITIMER_REAL, 0)
        return count

    assert in_child(storm, 90) >= 300


def test_ctrl_c_at_any_moment(tmp_path: Path):
    """Nothing stays locked or under way for ever, whatever line the interrupt strikes."""

    def interrupted() -> int:
        signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGINT))
        content = random_bytes(50_000)
        hits = 0
        with aio(tmp_path, threads=2, block_bytes=16 << 10) as engine:
            file = engine.open("x", "w", size=MIB)
            write(engine, file, content)
            deadline = time.monotonic() + 60
            while hits < 300:
                assert time.monotonic() < deadline
                hits += _interrupt(engine, [Request(content, file, write=True)])
            file.close()
            assert engine.statistics().in_flight == 0
            assert not live_ranges.overlap(content.data_ptr(), content.nbytes)
            assert usable(engine)
        return hits

    assert in_child(interrupted, 90) >= 300


def _interrupt(engine: Engine, requests: list[Request]) -> int:
    """Submit and wait; return how many interrupts came."""
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 1e-3))
            transfers = [engine.submit(requests) for _ in range(3)]
            for transfer in transfers:
                transfer.result()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt:
        return 1
    return 0


# -- processes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("shift", [0, 3])
def test_fork_while_reads_are_under_way(tmp_path: Path, shift):
    """The bytes arrive in the parent's pages, though the child shares them until one writes."""
    nbytes = 16 * MIB
    content = random_bytes(nbytes)
    with aio(tmp_path) as engine, engine.open("x", "w", size=nbytes) as file:
        write(engine, file, content)
        for _ in range(3):
            target = poisoned(nbytes, shift)
            transfer = engine.submit([Request(target, file)])
            child = start_child(functools.partial(_overwrite, target))
            transfer.result()
            assert torch.equal(target, content)
            assert child.result(30) == 1
            assert torch.equal(target, content)


def _overwrite(tensor: torch.Tensor) -> float:
    return tensor.fill_(1).min().item()


def test_a_child_opens_its_own_engine_while_the_parent_s_is_busy(tmp_path: Path):
    content = random_bytes(16 * MIB)

    def child() -> bool:
        with aio(tmp_path) as engine:
            return usable(engine)

    with aio(tmp_path) as engine, engine.open("x", "w", size=16 * MIB) as file:
        transfers = [engine.submit([Request(content, file, write=True)]) for _ in range(3)]
        assert in_child(child, 30)
        for transfer in transfers:
            transfer.result()
        assert torch.equal(read(engine, file, 16 * MIB), content)


def test_a_process_killed_in_the_middle(tmp_path: Path):
    content = random_bytes(4 * MIB)
    shared = mmap.mmap(-1, mmap.PAGESIZE)

    def writes() -> None:
        engine = aio(tmp_path)
        file = engine.open("x", "w", size=64 * MIB)
        write(engine, file, content)
        for i in range(10_000):
            engine.submit([Request(content, file, (1 + i % 15) * 4 * MIB, write=True)])
            shared[0] = 1

    child = start_child(writes)
    while shared[0] == 0:
        assert os.waitpid(child.pid, os.WNOHANG) == (0, 0)
        time.sleep(0.001)
    child.kill()
    with aio(tmp_path) as engine:
        with engine.open("x", "r+") as file:
            assert torch.equal(read(engine, file, 4 * MIB), content)
            write(engine, file, content, 4 * MIB)
            assert torch.equal(read(engine, file, 4 * MIB, 4 * MIB), content)
        assert usable(engine)


# -- files and file systems that change behind our back -------------------------------------------


@pytest.mark.parametrize("direct", ["auto", "no"])
def test_truncation_while_batches_run(tmp_path: Path, direct):
    nbytes = 4 * MIB
    content = random_bytes(nbytes)
    stop = threading.Event()

    def truncate() -> None:
        while not stop.is_set():
            os.truncate(tmp_path / "x", random.randrange(nbytes))

    ended = {"well": 0, "short": 0}
    with aio(tmp_path, direct=direct, block_bytes=64 << 10) as engine:
        file = engine.open("x", "w", size=nbytes)
        thread = threading.Thread(target=truncate)
        thread.start()
        try:
            for _ in range(30):
                write(engine, file, content)
                target = poisoned(nbytes)
                try:
                    engine.submit([Request(target, file)]).result(60)
                except EndOfFileError as error:
                    ended["short"] += 1
                    described = (error.path, error.offset, error.nbytes)
                else:
                    ended["well"] += 1
                    described = (file.path, 0, nbytes)
                assert described[0] == file.path
                assert described[1] is not None
                assert 0 <= described[1] < nbytes
        finally:
            stop.set()
            thread.join()
        assert ended["short"], ended
        write(engine, file, content)
        assert torch.equal(read(engine, file, nbytes), content)
        file.close()
        assert usable(engine)


def test_unmounting_behind_our_back(tmp_path: Path):
    """Unmounted lazily, a file system goes on for those who have files on it."""
    nbytes = 4 * MIB
    content = random_bytes(nbytes)
    with small_file_system(tmp_path, 32 * MIB) as folder:
        engine = aio(folder)
        file = engine.open("x", "w", size=nbytes)
        write(engine, file, content)
        transfers = [engine.submit([Request(content, file, write=True)]) for _ in range(3)]
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        try:
            for transfer in transfers:
                assert transfer.result(30).nbytes == nbytes
            assert torch.equal(read(engine, file, nbytes), content)
            assert usable(engine)
            engine.close()
            # What is at that path now is the folder below.
            with aio(folder) as below:
                assert usable(below)
                assert not (folder / "x").exists()
        finally:
            engine.close()


def test_memory_that_the_kernel_may_not_write_to(tmp_path: Path):
    """EFAULT, and not a dead process."""

    def protected() -> None:
        memory = mmap.mmap(-1, MIB, prot=mmap.PROT_READ)
        source = np.frombuffer(memory, "u1")
        with aio(tmp_path) as engine, engine.open("x", "w", size=MIB) as file:
            batch = engine.prepare([Request(source, file, write=True)])
            batch.table["write"] = 0  # reads into memory that may only be read
            error = engine.submit(batch).exception(30)
            assert isinstance(error, OSError)
            assert error.errno == errno.EFAULT
            assert usable(engine)

    in_child(protected)
