"""Memory is kept as long as needed and no longer; engines end however they are dropped."""

import gc
import os
import subprocess
import sys
import threading
import weakref

import pytest

from tensorspill.engine import Request
from tensorspill.errors import ClosedError
from tests.host_fallback.device.helpers import Guarded, held_stream, open_staged, random_array
from tests.pool.cuda.checks_driver import in_child
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda

SMALL = {"staging_block": 4096, "staging_bytes": 4 * 4096}


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("tensorspill")]


def test_memory_is_kept_until_the_end_and_then_let_go(tmp_path):
    gc.disable()
    try:
        with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "w") as file:
            array, content = random_array(100_000)
            kept = weakref.ref(array)
            with held_stream() as stream:
                transfer = engine.submit([Request(array, file, write=True)], stream=stream)
                del array
                assert kept() is not None
            transfer.result()
            engine.submit([Request(DeviceArray(10), file)]).result()
            assert kept() is None, "by counting references alone"
        assert (tmp_path / "x").read_bytes() == content.tobytes()
    finally:
        gc.enable()


def test_close_drains(tmp_path):
    engine = open_staged(tmp_path, **SMALL)
    file = engine.open("x", "w")
    arrays = [random_array(30_000) for _ in range(10)]
    transfers = [
        engine.submit([Request(a, file, i * 30_000, write=True)]) for i, (a, _) in enumerate(arrays)
    ]
    engine.close()
    assert all(transfer.done() for transfer in transfers)
    assert file.closed
    engine.close()
    assert (tmp_path / "x").read_bytes() == b"".join(c.tobytes() for _, c in arrays)
    with pytest.raises(ClosedError):
        engine.submit([])
    assert not threads()
    assert engine.statistics().bytes_written == 300_000
    assert engine.statistics().staging_bytes == 0


def test_an_engine_that_is_dropped(tmp_path):
    engine = open_staged(tmp_path, **SMALL)
    file = engine.open("x", "w")
    array, content = random_array(100_000)
    transfer = engine.submit([Request(array, file, write=True)])
    del engine, file
    gc.collect()
    transfer.result(60)
    del transfer
    gc.collect()
    assert (tmp_path / "x").read_bytes() == content.tobytes()
    assert not threads()


def test_nothing_leaks(tmp_path):
    def gauges() -> list[int]:
        gc.collect()
        names = ("streams", "events", "page-locked", "bytes", "contexts")
        return [cuda().gauge(name) for name in names] + [len(os.listdir("/proc/self/fd"))]

    def use() -> None:
        with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
            engine.submit([Request(random_array(10_000)[0], file, write=True)]).result()
            engine.submit([Request(DeviceArray(10_000), file)]).result()

    use()
    before = gauges()
    for _ in range(15):
        use()
    assert gauges() == before
    assert [cuda().gauge("contexts", device) for device in range(4)] == [1, 0, 0, 0]


def test_an_engine_that_did_nothing_takes_nothing(tmp_path):
    before = cuda().gauge("streams"), cuda().gauge("page-locked")
    with open_staged(tmp_path) as engine, engine.open("x", "w"):
        assert engine.statistics().staging_bytes == 0
        assert not threads()
        assert (cuda().gauge("streams"), cuda().gauge("page-locked")) == before


def test_a_forked_child(tmp_path):
    with open_staged(tmp_path, **SMALL) as engine, engine.open("x", "w") as file:
        array, content = random_array(50_000)
        with held_stream() as stream:
            transfer = engine.submit([Request(array, file, write=True)], stream=stream)

            def check() -> None:
                with pytest.raises(ClosedError):
                    engine.submit([])
                with pytest.raises(ClosedError):
                    transfer.result(1)
                file.close()
                engine.close()

            in_child(check)
        transfer.result(60)
        target = Guarded(50_000)
        engine.submit([Request(target.array, file)]).result(60)
        assert (target.content() == content).all()


PROGRAM = """
import sys
from tensorspill.engine import Request
from tests.host_fallback.device.helpers import open_staged, random_array

engine = open_staged(sys.argv[1])
array, content = random_array(3_000_000)
open(sys.argv[1] + "/expected", "wb").write(content.tobytes())
file = engine.open("x", "w")
transfer = engine.submit([Request(array, file, write=True)])
"""


def test_the_end_of_the_process_waits_for_what_is_under_way(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (tmp_path / "x").read_bytes() == (tmp_path / "expected").read_bytes()


INTERRUPTED = """
import os, signal, sys, threading
from tensorspill.engine import Request
from tests.host_fallback.device.helpers import held_stream, open_staged, random_array

with open_staged(sys.argv[1]) as engine, engine.open("x", "w") as file:
    array, _ = random_array(3_000_000)
    with held_stream() as stream:
        transfer = engine.submit([Request(array, file, write=True)], stream=stream)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            transfer.result()
        except KeyboardInterrupt:
            print("interrupted")
        print(type(transfer.exception(60)).__name__)
    engine.submit([Request(array, file, write=True)]).result()
"""


def test_an_interrupt_cancels(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.split() == ["interrupted", "CancelledError"]
