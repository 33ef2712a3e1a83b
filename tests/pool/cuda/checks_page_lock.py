"""Page-locked host memory."""

import gc
import threading

import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.pool import BufferPool, Slab
from tensorspill.pool.cuda import contexts
from tensorspill.pool.cuda.contexts import current
from tests.pool.cuda.checks_driver import in_child
from tests.standin.control import cuda

MIB = 1 << 20


def locked() -> int:
    return cuda().gauge("page-locked bytes")


def test_the_context_of_this_rank_s_own_gpu(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "6")
    with Slab(4 * MIB, page_lock="yes") as slab:
        assert slab.page_locked
        assert locked() == 4 * MIB
    assert locked() == 0
    assert contexts.retained() == (2,), "6 of 4 GPUs"
    # The thread's own context, where there is one.
    with current(1), Slab(MIB, page_lock="yes"):
        pass
    assert contexts.retained() == (1, 2)


def test_it_is_undone_from_any_thread():
    slab = Slab(MIB, page_lock="yes")
    thread = threading.Thread(target=slab.close)
    thread.start()
    thread.join()
    assert locked() == 0
    assert not slab.page_locked


def test_a_dropped_slab():
    slab = Slab(MIB, page_lock="yes")
    del slab
    gc.collect()
    assert locked() == 0


def test_pools_are_page_locked_where_possible():
    with BufferPool(MIB) as pool:
        assert pool.slab.page_locked
    assert locked() == 0


def test_a_driver_that_refuses():
    with cuda().failing("cuMemHostRegister=2"):
        with pytest.raises(UnsupportedError, match=r"Not page-locked: .*OUT_OF_MEMORY"):
            Slab(MIB, page_lock="yes")
        with Slab(MIB) as slab:
            assert not slab.page_locked
            assert any("OUT_OF_MEMORY" in note for note in slab.notes)
    assert locked() == 0


def test_a_forked_child_leaves_it_alone():
    with Slab(MIB, page_lock="yes") as slab:
        in_child(slab.close)
        assert locked() == MIB
