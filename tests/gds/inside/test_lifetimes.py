"""Whatever is dropped, closed, forked or interrupted: no hang, no crash, nothing left behind."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import CancelledError
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from tensorspill.engine import Engine, Request
from tensorspill.errors import ClosedError, MissingFileError, UnsupportedError
from tensorspill.gds.failures import Failure
from tensorspill.gds.file import GdsFile
from tensorspill.pool.cuda.streams import Stream
from tests.gds.inside.conftest import LANE
from tests.gds.inside.moving import fresh, gds, host_path, poisoned, read, write
from tests.standin.arrays import call
from tests.standin.control import cuda, cufile
from tests.thorough import THOROUGH

SIZE = 1 << 20


def test_a_missing_file_and_a_missing_folder(engine: Engine, tmp_path: Path):
    with pytest.raises(FileNotFoundError) as caught:
        engine.open("nothing")
    assert isinstance(caught.value, MissingFileError)
    assert caught.value.path == str(tmp_path / "nothing")
    with pytest.raises(MissingFileError):
        gds(tmp_path / "nothing")


def test_files_are_private_and_links_are_not_followed(engine: Engine, tmp_path: Path):
    """kvikio alone would follow the link, and make files that everybody may read."""
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.write_bytes(b"precious")
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(UnsupportedError, match="Links"):
        engine.open("link", "w")
    with engine.open("x", "w") as file:
        write(engine, file, fresh(100)[0])
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    assert outside.read_bytes() == b"precious"


def test_buffers_and_files_may_be_dropped_under_way(engine: Engine, tmp_path: Path):
    parts = [fresh(SIZE) for _ in range(6)]
    images = [data for _, data in parts]
    transfers = [
        engine.submit([Request(parts.pop(0)[0], engine.open(f"x{i}", "w", size=SIZE), write=True)])
        for i in range(6)
    ]
    gc.collect()
    for transfer in transfers:
        transfer.result(60)
    for i, image in enumerate(images):
        assert np.array_equal(np.fromfile(tmp_path / f"x{i}", "u1"), image)


def test_closing_waits(tmp_path: Path):
    array, data = fresh(8 << 20)
    engine = gds(tmp_path, block_bytes=65_536)
    files = [engine.open(f"x{i}", "w", size=8 << 20) for i in range(2)]
    transfers = [engine.submit([Request(array, file, write=True)]) for file in files]
    files[0].close()
    assert transfers[0].done()
    engine.close()
    assert transfers[1].done()
    for i in range(2):
        assert np.array_equal(np.fromfile(tmp_path / f"x{i}", "u1"), data)


def test_an_engine_nobody_holds(tmp_path: Path):
    array, data = fresh(4 << 20)
    engine = gds(tmp_path)
    transfer = engine.submit([Request(array, engine.open("x", "w", size=4 << 20), write=True)])
    gone = weakref.ref(engine)
    del engine
    gc.collect()
    assert gone() is None
    transfer.result(60)
    assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), data)


def test_cancelling(tmp_path: Path):
    array, data = fresh(4 << 20)
    with Stream(0) as stream, gds(tmp_path, stream_ordered="no") as engine:
        with engine.open("x", "w", size=4 << 20) as file:
            before = engine.submit([Request(array, file, write=True)])
            with cuda().holding(stream.handle):
                call("cuMemsetD8Async", array.address, 0, 100, stream.handle)
                late = engine.submit([Request(array, file, write=True)], stream=stream)
                before.result(60)
                assert late.cancel()
            with pytest.raises(CancelledError):
                late.result(60)
            assert late.cancelled()
            assert not late.cancel()
            assert np.array_equal(read(engine, file, 4 << 20), data)
        statistics = engine.statistics()
        assert (statistics.cancelled, statistics.in_flight) == (1, 0)


def test_descriptors_and_threads_are_given_back(tmp_path: Path):
    def held() -> tuple[int, int]:
        names = [t.name for t in threading.enumerate() if t.name.startswith("tensorspill-gds")]
        return len(os.listdir("/proc/self/fd")), len(names)

    def use() -> None:
        with (
            gds(tmp_path, host_path(tmp_path)) as engine,
            engine.open("x", "w", size=SIZE) as file,
        ):
            write(engine, file, fresh(SIZE)[0])
            cast(GdsFile, file).fall_back(Failure("a test"))
            write(engine, file, fresh(SIZE)[0])

    use()
    before = held()
    for _ in range(10):
        use()
    assert held() == before


def test_a_forked_child(engine: Engine, tmp_path: Path):
    """A child of kvikio's hangs in pread, and cuFile's state is its parent's."""
    array, data = fresh(4 << 20)
    with engine.open("x", "w", size=4 << 20) as file:
        transfer = engine.submit([Request(array, file, write=True)])
        child = os.fork()
        if child == 0:
            os._exit(_in_child(engine, file, array))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        transfer.result(60)
        assert np.array_equal(read(engine, file, 4 << 20), data)


def _in_child(engine: Engine, file, array) -> int:
    signal.alarm(60)
    try:
        try:
            engine.submit([Request(array, file)])
        except ClosedError:
            pass
        else:
            return 1
        file.close()
        engine.close()
        del engine, file
        gc.collect()
    except BaseException:
        return 2
    return 0


def test_an_engine_opened_in_a_forked_child(engine: Engine, tmp_path: Path):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        try:
            gds(tmp_path)
        except (ClosedError, UnsupportedError):
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


#: What depends on the lane; the rest is tried in one.
ENDS = ["not closed", "forked"]
if LANE == "cufile" and THOROUGH in os.environ:
    ENDS += ["closed", "in flight", "Ctrl-C"]


@pytest.mark.parametrize("how", ENDS)
def test_processes_end_well(tmp_path: Path, how):
    """kvikio#497: no crash at the end, whatever is still open."""
    script = """
        import os, signal, sys, threading
        from pathlib import Path
        signal.alarm(60)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        from tensorspill import Request
        from tests.gds.inside.moving import fresh, gds
        how = sys.argv[2]
        engine = gds(Path(sys.argv[1]), block_bytes=65536)
        file = engine.open("x", "w", size=16 << 20)
        array, _ = fresh(16 << 20)
        engine.submit([Request(array, file, write=True)]).result()
        if how == "closed":
            engine.close()
        elif how == "forked":
            if os.fork() == 0:
                signal.alarm(30)
                sys.exit(0)  # with all that an interpreter does at its end
            assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        elif how != "not closed":
            transfers = [engine.submit([Request(array, file, write=True)]) for _ in range(8)]
            if how == "Ctrl-C":
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
                try:
                    while True:
                        engine.submit([Request(array, file, write=True)]).result()
                except KeyboardInterrupt:
                    pass
                engine.submit([Request(array, file, write=True)]).result()
        print("end")
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path), how],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["end"]), ended.stderr
    assert ended.stderr == ""


def test_threads_share_an_engine(engine: Engine):
    """kvikio#917: handles and streams are used from many threads."""
    failures: list[BaseException] = []

    def work(i: int) -> None:
        try:
            with engine.open(f"x{i}", "w", size=200_000) as file:
                for _ in range(10):
                    array, data = fresh(100_000 + i)
                    write(engine, file, array, i)
                    assert np.array_equal(read(engine, file, len(data), i), data)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.skipif(LANE != "compat", reason="tried in the lane compat")
def test_importing_starts_nothing():
    script = """
        import sys, threading
        import tensorspill.gds, tensorspill.opening
        loaded = [m for m in ("kvikio", "cupy", "numba") if m in sys.modules]
        maps = open("/proc/self/maps").read()
        print(loaded, threading.active_count(), "libcufile" in maps, "libcuda.so" in maps)
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert ended.stdout.split() == ["[]", "1", "False", "False"]


@pytest.mark.skipif(LANE != "cufile", reason="only in the lane cufile")
def test_the_handle_is_closed_before_the_descriptor(engine: Engine):
    file = engine.open("x", "w", size=SIZE)
    assert cufile().gauge("registered files") == 1
    write(engine, file, fresh(SIZE)[0])
    file.close()
    assert cufile().gauge("registered files") == 0
    with pytest.raises(ClosedError):
        engine.submit([Request(poisoned(10), file)])
