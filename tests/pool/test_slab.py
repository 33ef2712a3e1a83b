"""Slabs: addresses, lifetimes, and what is noted when something is not possible."""

import ctypes
import gc
import os
import resource
import subprocess
import sys
import weakref

import numpy as np
import pytest
import torch

from tensorspill.errors import BrokenError, ClosedError, UnsupportedError
from tensorspill.pool.numa import prefer_node
from tensorspill.pool.slab import HUGE_PAGE, Slab


def has_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


@pytest.mark.parametrize("nbytes", [0, 1, 4095, 4096, 5000, HUGE_PAGE - 1, HUGE_PAGE, 5_000_001])
def test_memory_is_aligned_zeroed_and_writable(nbytes: int) -> None:
    with Slab(nbytes, page_lock="no") as slab:
        assert slab.address % (HUGE_PAGE if nbytes >= HUGE_PAGE else 4096) == 0
        tensor = slab.tensor
        assert tensor.dtype == torch.uint8
        assert tuple(tensor.shape) == (nbytes,) == (slab.nbytes,)
        assert not tensor.any()
        if nbytes:
            assert tensor.data_ptr() == slab.address
            tensor.fill_(7)
            assert slab.tensor[-1] == 7


@pytest.mark.parametrize("alignment", [1, 64, 8192, 1 << 16, HUGE_PAGE])
def test_alignment(alignment: int) -> None:
    slabs = [Slab(10_000, page_lock="no", alignment=alignment) for _ in range(5)]
    assert all(slab.address % max(alignment, 4096) == 0 for slab in slabs)


def test_reserves_no_more_than_asked() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[0]) * resource.getpagesize()

    before = mapped()
    nbytes = 512 << 20
    slab = Slab(nbytes, page_lock="no")
    assert mapped() - before <= 1.02 * nbytes + HUGE_PAGE
    slab.close()


def test_tensor_outlives_the_slab() -> None:
    slab = Slab(3 * HUGE_PAGE, page_lock="no")
    expected = torch.randint(256, (slab.nbytes,), dtype=torch.uint8)
    view = slab.tensor.copy_(expected)[4096:].view(torch.float16)
    memory = weakref.ref(slab.array)
    slab.close()
    slab.close()
    del slab
    gc.collect()
    assert memory() is not None
    assert torch.equal(view.view(torch.uint8), expected[4096:])
    del view
    gc.collect()
    assert memory() is None


def test_closed() -> None:
    slab = Slab(4096)
    slab.close()
    assert slab.closed
    assert not slab.page_locked
    with pytest.raises(ClosedError):
        _ = slab.tensor
    with pytest.raises(ClosedError):
        _ = slab.array
    assert "closed" in repr(slab)


def test_page_lock_without_a_driver() -> None:
    if has_driver():
        pytest.skip("this node has a CUDA driver")
    with pytest.raises(UnsupportedError, match="No CUDA driver"):
        Slab(4096, page_lock="yes")
    slab = Slab(4096, page_lock="auto")
    assert not slab.page_locked
    assert any("No CUDA driver" in note for note in slab.notes)
    assert not Slab(4096, page_lock="no").notes


@pytest.mark.gpu
def test_page_lock_on_a_gpu() -> None:
    pytest.importorskip("cuda.bindings.driver")
    with Slab(4 << 20, page_lock="yes") as slab:
        assert slab.page_locked
        assert slab.tensor.is_pinned()
        tensor = slab.tensor
    assert not tensor.is_pinned()
    tensor.fill_(1)


def test_numa_node() -> None:
    slab = Slab(HUGE_PAGE, numa_node=0, page_lock="no")
    assert all("NUMA node 0" in note for note in slab.notes)
    slab.tensor.fill_(1)


def test_numa_node_that_is_not_there() -> None:
    with pytest.raises(UnsupportedError, match="node 4000"):
        Slab(4096, numa_node=4000)
    with pytest.raises(UnsupportedError):
        Slab(4096, numa_node=-1)


def test_numa_refusal_is_told() -> None:
    array = np.zeros(8192, np.uint8)
    unaligned = array.ctypes.data | 1
    note = prefer_node(unaligned, 4096, 0)
    assert note is not None
    assert "NUMA node 0" in note


def test_too_much_memory() -> None:
    for nbytes in (1 << 60, 1 << 70):
        with pytest.raises(BrokenError) as caught:
            Slab(nbytes)
        assert caught.value.nbytes == nbytes
        assert isinstance(caught.value, OSError)


def test_arguments() -> None:
    with pytest.raises(UnsupportedError):
        Slab(-1)
    with pytest.raises(UnsupportedError, match="page_lock"):
        Slab(1, page_lock="maybe")  # type: ignore[arg-type]
    for alignment in (0, 3, 4 << 20):
        with pytest.raises(UnsupportedError, match="power of two"):
            Slab(1, alignment=alignment)


@pytest.mark.thorough
def test_import_starts_nothing() -> None:
    program = (
        # Some builds of torch import cuda-python themselves, without loading the driver.
        "import sys, threading, torch\n"
        "before = set(sys.modules)\n"
        "import tensorspill.pool\n"
        "assert threading.active_count() == 1\n"
        "new = set(sys.modules) - before\n"
        "loaded = {'numba', 'cuda', 'cuda.bindings.driver', 'cuda.core', 'cupy'} & new\n"
        "assert not loaded, loaded\n"
        "assert 'libcuda' not in open('/proc/self/maps').read()\n"
    )
    paths = os.pathsep.join(path for path in sys.path if path)
    subprocess.run(
        [sys.executable, "-c", program], check=True, env=os.environ | {"PYTHONPATH": paths}
    )
