"""The driver's codes as errors, contexts only where they are used, forked children."""

import os
import threading
import traceback

import pytest

from tensorspill.errors import BrokenError, CapacityError, ClosedError, SpillError, UnsupportedError
from tensorspill.pool.cuda import contexts, driver
from tensorspill.pool.cuda.contexts import current
from tests.standin.control import cuda


def in_child(check):
    """Run a check in a forked child, which ends without cleaning up."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            check()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_contexts_only_on_devices_in_use():
    assert contexts.retained() == ()
    assert contexts.count() == 4
    assert cuda().gauge("contexts") == 0
    with current(2):
        assert int(driver.call("cuCtxGetDevice")) == 2
    assert contexts.retained() == (2,)
    assert [cuda().gauge("contexts", device) for device in range(4)] == [0, 0, 1, 0]


def test_contexts_nest_and_leave_what_was_current():
    before = int(driver.call("cuCtxGetCurrent"))
    with current(0):
        with current(1):
            with current(1):
                assert int(driver.call("cuCtxGetDevice")) == 1
            assert int(driver.call("cuCtxGetDevice")) == 1
        assert int(driver.call("cuCtxGetDevice")) == 0
        with pytest.raises(RuntimeError, match="mine"), current(1):
            raise RuntimeError("mine")
        assert int(driver.call("cuCtxGetDevice")) == 0
    assert int(driver.call("cuCtxGetCurrent")) == before


def test_one_context_however_many_threads_ask():
    made = cuda().gauge("contexts made")
    start = threading.Barrier(8)

    def use() -> None:
        start.wait()
        with current(3):
            driver.call("cuCtxGetDevice")

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cuda().gauge("contexts", 3) == 1
    assert cuda().gauge("contexts made") == made + 1


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, UnsupportedError),  # INVALID_VALUE
        (2, CapacityError),  # OUT_OF_MEMORY
        (201, UnsupportedError),  # INVALID_CONTEXT
        (700, BrokenError),  # ILLEGAL_ADDRESS
        (719, BrokenError),  # LAUNCH_FAILED
        (801, UnsupportedError),  # NOT_SUPPORTED
        (999, BrokenError),  # UNKNOWN
    ],
)
def test_codes(code, kind):
    with current(0), cuda().failing(f"cuMemAlloc={code}"), pytest.raises(SpillError) as caught:
        driver.call("cuMemAlloc", 100)
    assert type(caught.value) is kind
    assert "cuMemAlloc failed with CUDA_ERROR_" in str(caught.value)


def test_devices_by_name():
    assert str(contexts.normal_device("cuda")) == "cuda:0"
    assert str(contexts.normal_device("cuda:3")) == "cuda:3"
    for device in ("cpu", "cuda:4", "nonsense", "cuda:-1"):
        with pytest.raises(UnsupportedError):
            contexts.normal_device(device)


def test_a_function_that_does_not_exist():
    with pytest.raises(UnsupportedError, match="cuNothing"):
        driver.call("cuNothing")


def test_a_forked_child():
    def check() -> None:
        assert "forked" in str(driver.why_not())
        with pytest.raises(ClosedError, match="forked"):
            driver.call("cuDeviceGetCount")
        with pytest.raises(ClosedError), current(0):
            pass

    with current(0):
        pass
    in_child(check)
