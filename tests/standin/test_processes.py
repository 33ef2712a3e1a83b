"""What only a process of its own can show: other drivers, and how a process ends."""

from collections.abc import Mapping

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import Ended, run_python
from tests.standin.lanes import LANES, lane


def run(name: str, script: str, *arguments: object, **environment: str) -> Ended:
    """Run a script in a lane, or skip saying why there is none."""
    try:
        found = lane(name)
    except UnavailableError as reason:
        pytest.skip(f"lane {name}: {reason}")
    variables: Mapping[str, str] = environment
    return run_python(found, script, *map(str, arguments), timeout=120, environment=variables)


def check(ended: Ended) -> list[str]:
    assert ended.returncode == 0, ended
    assert ended.errors == ""
    return ended.output.split()


@pytest.mark.parametrize("backend", ["aio", "gds"])
@pytest.mark.thorough
def test_a_driver_without_a_device(tmp_path, backend):
    script = """
        import sys, tensorspill, tensorspill.errors
        try:
            tensorspill.open_engine(sys.argv[1], "cuda:0", backend=sys.argv[2])
        except tensorspill.errors.UnsupportedError as error:
            print(type(error).__name__)
    """
    ended = run("compat", script, tmp_path, backend, STANDIN_CUDA_DEVICES="0")
    assert check(ended) == ["UnsupportedError"]


@pytest.mark.parametrize("version", ["11080", "12040", "13020"])
@pytest.mark.thorough
def test_versions_of_the_driver(tmp_path, version):
    script = """
        import sys, tensorspill, tensorspill.errors
        from tests.standin.arrays import DeviceArray
        try:
            with tensorspill.open_engine(sys.argv[1], "cuda:0") as engine:
                with engine.open("x", "w") as file:
                    request = tensorspill.Request(DeviceArray(100_000), file, write=True)
                    print(engine.submit([request]).result().nbytes)
        except tensorspill.errors.UnsupportedError:
            print("refused")
    """
    outcome = check(run("compat", script, tmp_path, STANDIN_CUDA_DRIVER_VERSION=version))
    assert outcome in (["100000"], ["refused"])
    if int(version) >= 12080:
        assert outcome == ["100000"]


@pytest.mark.thorough
def test_contexts_only_on_the_device_in_use(tmp_path):
    script = """
        import sys, tensorspill, tensorspill.errors
        from tests.standin.arrays import DeviceArray
        from tests.standin.control import cuda
        for backend in ("aio", "gds"):
            with tensorspill.open_engine(sys.argv[1], "cuda:1", backend=backend) as engine:
                with engine.open("x", "w") as file:
                    request = tensorspill.Request(DeviceArray(100_000, 1), file, write=True)
                    engine.submit([request]).result()
        print(*(cuda().gauge("contexts made", device) for device in range(4)))
    """
    ended = run("cufile", script, tmp_path, STANDIN_CUDA_DEVICES="4")
    assert check(ended) == ["0", "1", "0", "0"]


@pytest.mark.thorough
def test_importing_starts_no_driver():
    script = """
        import sys, torch
        before = set(sys.modules)
        import tensorspill, tensorspill.gds, tensorspill.pool, tensorspill.host_fallback
        import tensorspill.pool.cuda, tensorspill.host_fallback.device
        print(any("libcuda.so" in line for line in open("/proc/self/maps")))
        print(any(name.startswith(("kvikio", "cuda.")) for name in set(sys.modules) - before))
    """
    assert check(run("compat", script)) == ["False", "False"]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name != "cufile")) for name in LANES],
)
def test_a_process_ends_with_everything_open(tmp_path, name):
    """Engines, pools, files, registrations and transfers under way are left to the interpreter."""
    script = """
        import sys, tensorspill, tensorspill.errors
        from tensorspill.pool import BufferPool
        from tests.standin.arrays import DeviceArray
        engines = [
            tensorspill.open_engine(sys.argv[1], "cuda:0", backend=name) for name in ("gds", "aio")
        ]
        pool = BufferPool(8 << 20, "cuda:0")
        buffer, array = pool.allocate(4 << 20), DeviceArray(4 << 20)
        for number, engine in enumerate(engines):
            file = engine.open(f"x{number}", "w", size=64 << 20)
            requests = [
                tensorspill.Request(memory, file, at << 22, write=True)
                for at, memory in enumerate([buffer, array] * 8)
            ]
            kept = [engine.submit([request]) for request in requests]
        print("left")
    """
    assert check(run(name, script, tmp_path)) == ["left"]


@pytest.mark.thorough
def test_memory_that_runs_out(tmp_path):
    script = """
        import sys, tensorspill, tensorspill.errors
        from tensorspill.pool import BufferPool
        try:
            BufferPool(1 << 30, "cuda:0")
        except tensorspill.errors.CapacityError as error:
            print(error.asked)
    """
    assert check(run("compat", script, tmp_path, STANDIN_CUDA_MEMORY=str(1 << 28)))
