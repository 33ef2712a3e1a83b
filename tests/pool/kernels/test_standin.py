"""Digests of GPU memory where torch has no CUDA: on the stand-in driver."""

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_python
from tests.standin.lanes import lane

_DIGESTS = """
    import numpy as np
    from tensorspill.errors import UnsupportedError
    from tensorspill.pool import BufferPool, digest
    from tensorspill.pool.kernels.digesting import begin_digests
    from tests.standin import control
    from tests.standin.arrays import DeviceArray, call, use_device

    use_device(0)
    for nbytes in (1, 7, 4096, 100_001):
        content = np.random.default_rng().integers(0, 256, nbytes, np.uint8)
        array = DeviceArray(nbytes + 3)[3:]
        array.store(content)
        assert digest(array) == digest(content)
    with BufferPool("1MiB", device="cuda:0") as pool:
        buffer, other = pool.allocate(100_001), pool.allocate(5)
        zeros = np.zeros(100_001, np.uint8)
        call("cuMemcpyHtoD", buffer.address, zeros.ctypes.data, 100_001)
        call("cuMemcpyHtoD", other.address, content.ctypes.data, 5)
        found = begin_digests([buffer, other], after_current=False).values()
        assert found == [digest(zeros), digest(content[:5])]
        # After what the stream is doing: a copy that takes its time.
        with control.cuda().failing("cuMemcpyHtoDAsync=delay:300000"):
            call("cuMemcpyHtoDAsync", buffer.address, content.ctypes.data, 100_001, 0)
            assert digest(buffer) == digest(content)
        before = control.cuda().gauge("streams"), control.cuda().gauge("events")
        begin_digests([buffer, other]).values()
        assert (control.cuda().gauge("streams"), control.cuda().gauge("events")) == before
        released = pool.allocate(10)
        released.release()
        for bad in (released, np.zeros(3)):
            try:
                begin_digests([bad, buffer])
            except (UnsupportedError, ValueError):
                continue
            raise AssertionError(bad)
        buffer.release()
        other.release()
"""


def test_digests():
    try:
        chosen = lane("compat")
    except UnavailableError as error:
        pytest.skip(str(error))
    ended = run_python(chosen, _DIGESTS, flags=("-W", "error"))
    assert ended.returncode == 0, ended.errors
