"""Without a driver everything says why, and importing anything starts nothing."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tensorspill
from tensorspill.errors import UnsupportedError
from tensorspill.pool import BufferPool
from tensorspill.pool.cuda import contexts, driver
from tensorspill.pool.cuda.arrays import memory_of
from tensorspill.pool.cuda.memory import DeviceSlab
from tensorspill.pool.cuda.streams import Event, Stream


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


without_driver = pytest.mark.skipif(has_driver(), reason="this node has a CUDA driver")


@without_driver
@pytest.mark.parametrize(
    "use",
    [
        contexts.count,
        driver.version,
        lambda: contexts.normal_device("cuda"),
        lambda: Stream(0),
        lambda: Event(0),
        lambda: DeviceSlab(100),
        lambda: BufferPool(100, "cuda"),
        lambda: BufferPool(100, "cuda:3", resource="cupy"),
        lambda: driver.call("cuMemAlloc", 1),
    ],
)
def test_it_says_why(use):
    with pytest.raises(UnsupportedError, match="No CUDA driver"):
        use()


@without_driver
def test_why_not():
    assert driver.why_not() == "No CUDA driver (libcuda.so.1)"
    driver.check_process()
    assert contexts.retained() == ()


@without_driver
@pytest.mark.parametrize("device", ["cuda", "cuda:0", "cuda:7"])
def test_an_engine(device, tmp_path):
    with pytest.raises(UnsupportedError, match="No CUDA driver"):
        tensorspill.open_engine(tmp_path, device, backend="aio")


def test_an_array_that_is_none():
    with pytest.raises(UnsupportedError):
        memory_of(object())


@pytest.mark.thorough
def test_imports_start_nothing():
    root = Path(tensorspill.__file__).parent
    modules = [
        f"tensorspill.{folder}.{path.stem}"
        for folder in ("pool.cuda", "host_fallback.device")
        for path in sorted((root / folder.replace(".", "/")).glob("*.py"))
        # Compiled loops are imported with the first engine.
        if path.stem not in ("__init__", "arrange", "work", "stager", "engine")
    ]
    program = (
        "import sys, threading, torch\n"
        "before = set(sys.modules)\n"
        f"import {', '.join(modules)}\n"
        "assert threading.active_count() == 1\n"
        "loaded = {'numba', 'cuda.core', 'cupy', 'kvikio'} & (set(sys.modules) - before)\n"
        "assert not loaded, loaded\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths}
    )
