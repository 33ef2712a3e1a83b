"""Statistics say which way the bytes really took, and settings are kvikio's again afterwards."""

import subprocess
import sys
import textwrap
from pathlib import Path

import kvikio.defaults
import pytest

from tensorspill.engine import Engine, Request
from tensorspill.pool import BufferPool
from tests.gds.inside.conftest import LANE
from tests.gds.inside.moving import fresh, gds, poisoned, read, write
from tests.standin.control import cuda, cufile


def by_path(engine: Engine) -> dict[str, int]:
    return {path: moved.nbytes for path, moved in engine.statistics().by_path.items()}


@pytest.mark.skipif(LANE == "cufile", reason="cuFile works in this lane")
def test_a_silent_host_path_is_no_gpudirect_storage(engine: Engine):
    """cudf#18000: what libcufile or kvikio moves through host memory counts as compat."""
    with engine.open("x", "w", size=1 << 20) as file:
        write(engine, file, fresh(1 << 20)[0])
        read(engine, file, 100)
    assert by_path(engine) == {"compat": (1 << 20) + 100}
    assert any("no GPUDirect Storage" in note for note in engine.statistics().notes)


@pytest.mark.cufile
def test_paths_by_size_and_alignment(tmp_path: Path):
    """kvikio#192: small operations do not go through cuFile; the others are seen there."""
    with (
        BufferPool(1 << 20, device="cuda:0") as pool,
        gds(tmp_path, stream_ordered="no") as engine,
        engine.open("x", "w", size=1 << 20) as file,
    ):
        buffer = pool.allocate(1 << 20)
        expected: dict[str, int] = {}
        for nbytes, offset, path, calls in (
            (8192, 0, "below-threshold", 0),
            (16_383, 0, "below-threshold", 0),
            (16_384, 0, "direct", 1),
            (1 << 20, 0, "direct", 1),
            (20_000, 0, "bounce", 1),
            (16_384, 512, "bounce", 1),
        ):
            before = cufile().count("cuFileRead")
            engine.submit([Request(buffer, file, offset, nbytes=nbytes)]).result()
            assert cufile().count("cuFileRead") - before == calls
            expected[path] = expected.get(path, 0) + nbytes
        assert by_path(engine) == expected
        buffer.release()


@pytest.mark.cufile
def test_memory_of_ours_stays_registered_and_that_of_others_does_not(tmp_path: Path):
    array, _ = fresh(1 << 20)
    with BufferPool(1 << 20, device="cuda:0") as pool, gds(tmp_path) as engine:
        buffer = pool.allocate(1 << 20)
        with engine.open("x", "w", size=1 << 20) as file:
            engine.submit([Request(buffer, file, write=True)]).result()
            assert cufile().gauge("registered buffers") == 1
            write(engine, file, array)
            assert cufile().gauge("registered buffers") == 1
        buffer.release()
    assert cufile().gauge("registered buffers") == 0


@pytest.mark.cufile
def test_a_thousand_cycles_leave_no_registration(engine: Engine):
    before = cufile().count("cuFileBufRegister")
    with engine.open("x", "w", size=1 << 20) as file:
        for _ in range(1000):
            array, _ = fresh(32 << 10)
            write(engine, file, array)
            array.free()
    assert cufile().count("cuFileBufRegister") > before
    assert cufile().gauge("registered buffers") == 0
    assert cuda().gauge("freed while registered") == 0


@pytest.mark.cufile
def test_without_room_to_register(tmp_path: Path):
    with gds(tmp_path, registered_bytes=0) as engine, engine.open("x", "w", size=1 << 20) as file:
        write(engine, file, fresh(1 << 20)[0])
        assert by_path(engine) == {"bounce": 1 << 20}


def test_kvikios_settings_are_lent(tmp_path: Path):
    names = ("num_threads", "gds_threshold", "auto_direct_io_read", "auto_direct_io_write")
    before = [kvikio.defaults.get(name) for name in names]
    with gds(tmp_path, threads=3, direct="no") as one:
        assert [kvikio.defaults.get(name) for name in names] == [3, 16 << 10, False, False]
        with gds(tmp_path, threads=5) as two:
            assert kvikio.defaults.get("num_threads") == 5
            assert any("auto_direct_io_read" in note for note in two.statistics().notes)
        assert kvikio.defaults.get("num_threads") == 3
        assert not any("auto_direct_io_read" in note for note in one.statistics().notes)
    assert [kvikio.defaults.get(name) for name in names] == before


@pytest.mark.skipif(LANE == "real", reason="libcufile itself makes a context on every GPU it sees")
def test_contexts_only_on_the_device_in_use(tmp_path: Path):
    """vllm#34070: of four devices, one has a context."""
    script = """
        import sys
        from pathlib import Path
        from tests.gds.inside.moving import fresh, gds, write
        from tests.standin.control import cuda
        with gds(Path(sys.argv[1])) as engine, engine.open("x", "w", size=1 << 20) as file:
            write(engine, file, fresh(1 << 20)[0])
        print([cuda().gauge("contexts", device) for device in range(4)])
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert ended.stdout.strip() == "[1, 0, 0, 0]"


def test_destinations_are_only_written_to(engine: Engine):
    target = poisoned(100)
    target.read_only = True
    with engine.open("x", "w", size=100) as file, pytest.raises(ValueError, match="read-only"):
        engine.submit([Request(target, file)])
