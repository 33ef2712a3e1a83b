"""libcuda is there and shows no GPU."""

import pytest

import tensorspill
from tensorspill.errors import UnsupportedError
from tensorspill.pool import BufferPool, Slab
from tensorspill.pool.cuda import contexts, driver


def test_it_is_said():
    why = driver.why_not()
    assert why is not None
    assert "GPU" in why
    with pytest.raises(UnsupportedError, match="GPU"):
        contexts.count()


def test_what_needs_one_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match="GPU"):
        BufferPool(4096, "cuda:0")
    with pytest.raises(UnsupportedError, match="GPU"):
        tensorspill.open_engine(tmp_path, "cuda:0", backend="aio")


def test_host_memory_works():
    with pytest.raises(UnsupportedError, match="Not page-locked"):
        Slab(4096, page_lock="yes")
    with Slab(4096) as slab:
        assert not slab.page_locked
