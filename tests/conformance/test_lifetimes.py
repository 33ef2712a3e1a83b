"""Buffers, files and engines live as long as needed; interrupts and forks do no harm."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import CancelledError
from pathlib import Path

import pytest
import torch

from tensorspill.engine import Engine, Request
from tensorspill.errors import BusyError, ClosedError
from tests.conformance.data import (
    bytes_of,
    equal,
    fill,
    host,
    joined,
    poisoned,
    random_bytes,
    read,
    write,
)
from tests.conformance.lanes import STREAMED, Lane, for_tensors
from tests.conformance.memory import MEMORY


def copy_of(buffer):
    copy = poisoned(len(buffer))
    fill(copy, host(buffer))
    return copy


def test_dropped_buffers(engine: Engine):
    contents = [random_bytes(100_000) for _ in range(20)]
    with engine.open("x", "w", size=2_000_000) as file:
        transfers = [
            engine.submit([Request(copy_of(c), file, i * 100_000, write=True)])
            for i, c in enumerate(contents)
        ]
        gc.collect()
        for transfer in transfers:
            transfer.result()
        assert equal(read(engine, file, 2_000_000), joined(contents))


@for_tensors
def test_a_parameter_pointed_elsewhere_while_under_way(engine: Engine):
    content = random_bytes(400_000).view(torch.float32)
    parameter = torch.nn.Parameter(content.clone(), requires_grad=False)
    with engine.open("x", "w") as file:
        transfer = engine.submit([Request(parameter, file, write=True)])
        parameter.data = torch.empty(1, device=MEMORY.device).expand(parameter.shape)
        transfer.result()
        assert equal(read(engine, file, 400_000), content.view(torch.uint8))


def test_close_waits_for_transfers(lane: Lane, tmp_path: Path):
    content = random_bytes(8_000_000)
    engine = lane.open(tmp_path)
    file = engine.open("x", "w", size=len(content))
    transfer = engine.submit([Request(content, file, write=True)])
    engine.close()
    assert transfer.done()
    assert (tmp_path / "x").read_bytes() == bytes_of(content)


def test_closing_a_file_waits_for_its_transfers(engine: Engine, tmp_path: Path):
    content = random_bytes(8_000_000)
    file = engine.open("x", "w", size=len(content))
    transfer = engine.submit([Request(content, file, write=True)])
    file.close()
    assert transfer.done()
    assert (tmp_path / "x").read_bytes() == bytes_of(content)


def test_an_engine_nobody_holds(lane: Lane, tmp_path: Path):
    content = random_bytes(3_000_000)
    engine = lane.open(tmp_path)
    transfer = engine.submit(
        [Request(content, engine.open("x", "w", size=len(content)), write=True)]
    )
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    assert transfer.result(60).nbytes == len(content)
    assert (tmp_path / "x").read_bytes() == bytes_of(content)


def test_memory_under_way_is_not_freed(lane: Lane, engine: Engine):
    from tensorspill.pool import BufferPool

    with (
        BufferPool(lane.much // 4, MEMORY.device) as pool,
        engine.open("x", "w", size=lane.much // 4) as file,
    ):
        buffer = pool.allocate(lane.much // 4)
        out = engine.prepare([Request(buffer, file, write=True)])
        transfers = [engine.submit(out) for _ in range(40)]
        with pytest.raises(BusyError):
            buffer.release()
        with pytest.raises(BusyError):
            pool.close()
        for transfer in transfers:
            transfer.result()
        buffer.release()
        assert pool.statistics().free == pool.capacity


def test_done_callbacks_may_submit(engine: Engine):
    content, done = random_bytes(10_000), threading.Event()
    with engine.open("x", "w", size=20_000) as file:

        def again(_: object) -> None:
            engine.submit([Request(content, file, 10_000, write=True)]).add_done_callback(
                lambda _: done.set()
            )

        engine.submit([Request(content, file, write=True)]).add_done_callback(again)
        assert done.wait(60)
        assert equal(read(engine, file, 20_000), joined([content, content]))


def test_cancelling(lane: Lane, engine: Engine):
    if lane.name in STREAMED:
        pytest.skip("what was put on a stream can't be cancelled any more: see tests/gds")
    # So much that the last can't be over before it is cancelled, however busy the machine.
    content = random_bytes(lane.much // 4)
    with engine.open("x", "w", size=lane.much // 4) as file:
        out = engine.prepare([Request(content, file, write=True)])
        transfers = [engine.submit(out) for _ in range(60)]
        assert transfers[-1].cancel()
        with pytest.raises(CancelledError):
            transfers[-1].result(60)
        assert transfers[-1].cancelled()
        assert not transfers[-1].cancel()
        for transfer in transfers[:-1]:
            transfer.result()
        write(engine, file, content[:5000])
        assert equal(read(engine, file, 5000), content[:5000])
    statistics = engine.statistics()
    assert (statistics.cancelled, statistics.in_flight) == (1, 0)


def test_waiting_with_a_time_limit(lane: Lane, engine: Engine):
    content = random_bytes(lane.much // 4)
    with engine.open("x", "w", size=lane.much // 4) as file:
        out = engine.prepare([Request(content, file, write=True)])
        transfers = [engine.submit(out) for _ in range(40)]
        with pytest.raises(TimeoutError):
            transfers[-1].result(0)
        assert transfers[-1].result().nbytes == lane.much // 4


def test_other_threads_run_while_one_waits(lane: Lane, engine: Engine):
    count, stop = 0, threading.Event()

    def spin() -> None:
        nonlocal count
        while not stop.is_set():
            count += 1

    with engine.open("x", "w", size=lane.much) as file:
        write(engine, file, random_bytes(4096))
        thread = threading.Thread(target=spin)
        thread.start()
        before = count
        write(engine, file, random_bytes(lane.much))
        progress = count - before
        stop.set()
        thread.join()
    assert progress > 0


def test_threads_submit_while_others_wait(engine: Engine):
    contents = [random_bytes(50_000 + i, i) for i in range(8)]
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with engine.open(f"x{i}", "w") as file:
                for _ in range(10):
                    write(engine, file, contents[i])
                    assert equal(read(engine, file, len(contents[i])), contents[i])
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_forked_child(engine: Engine):
    content = random_bytes(16 << 20)
    with engine.open("x", "w", size=16 << 20) as file:
        write(engine, file, content[:4096])
        transfer = engine.submit([Request(content, file, write=True)])
        another = [Request(poisoned(10), file)]
        child = os.fork()
        if child == 0:
            os._exit(_in_child(engine, file, transfer, another))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        transfer.result()
        assert equal(read(engine, file, 16 << 20), content)


def _in_child(engine: Engine, file, transfer, another) -> int:
    """Return 0 if a child is told clearly, and can close what it inherited."""
    signal.alarm(60)
    try:
        for use in (lambda: engine.submit(another), transfer.result):
            try:
                use()
            except ClosedError:
                continue
            if use != transfer.result or not transfer.done():
                return 1
        file.close()
        engine.close()
    except BaseException:
        return 2
    return 0


@pytest.mark.costly
@pytest.mark.parametrize(
    "how",
    ["Ctrl-C", "exit without closing", pytest.param("python -O", marks=pytest.mark.thorough)],
)
def test_processes_end_well(lane: Lane, tmp_path: Path, how):
    script = """
        import faulthandler, os, signal, sys, threading
        from tests.conformance.data import constant, fill, host, poisoned
        faulthandler.dump_traceback_later(100, exit=True)
        from tensorspill import Request
        from tests.conformance.lanes import LANES
        lane = next(lane for lane in LANES if lane.name == sys.argv[1])
        engine = lane.open(sys.argv[2])
        file = engine.open("x", "w", size=lane.much)
        content = poisoned(lane.much)
        fill(content, constant(lane.much, 7))
        engine.submit([Request(content[:4096], file, write=True)]).result()
        transfers = [engine.submit([Request(content, file, write=True)]) for _ in range(4)]
        if sys.argv[3] == "Ctrl-C":
            threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                transfers[-1].result()
            except KeyboardInterrupt:
                print("interrupted")
            back = poisoned(4096)
            engine.submit([Request(back, file)]).result()
            assert bool((host(back) == 7).all())
            print("usable")
        elif sys.argv[3] == "python -O":
            print(transfers[-1].result().nbytes)
    """
    command = [sys.executable, *(["-O"] if how == "python -O" else [])]
    command += ["-c", textwrap.dedent(script), lane.name, str(tmp_path), how]
    begin = time.monotonic()
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
    if how == "Ctrl-C":
        assert ended.stdout.split()[-1:] == ["usable"]
    elif how == "python -O":
        assert ended.stdout.strip() == str(lane.much)
        assert (tmp_path / "x").read_bytes() == b"\x07" * lane.much
    assert time.monotonic() - begin < 110
