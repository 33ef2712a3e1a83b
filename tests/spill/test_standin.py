"""Spill files of GPU memory, on the stand-in driver: checked from end to end."""

import pytest

from tests.standin.build import UnavailableError
from tests.standin.child import run_python
from tests.standin.lanes import lane

_VERIFIED = """
    import sys
    import numpy as np
    from tensorspill import BufferPool, SpillFile
    from tensorspill.errors import CorruptError
    from tests.standin.arrays import call, use_device

    def fill(buffer, content):
        call("cuMemcpyHtoD", buffer.address, content.ctypes.data, content.nbytes)

    def content(buffer):
        found = np.empty(buffer.nbytes, np.uint8)
        call("cuMemcpyDtoH", found.ctypes.data, buffer.address, buffer.nbytes)
        return found

    use_device(0)
    folder, backend = sys.argv[1:]
    sizes = {"small": 5, "odd": 70_001, "large": 9 << 20}
    values = {n: np.random.default_rng().integers(0, 256, s, np.uint8) for n, s in sizes.items()}
    with (
        BufferPool("32MiB", device="cuda:0") as pool,
        SpillFile(folder, device="cuda:0", backend=backend, verify=True) as spill,
    ):
        buffers = {name: pool.allocate(size) for name, size in sizes.items()}
        for name, value in values.items():
            fill(buffers[name], value)
        spill.put(buffers).result()
        for buffer in buffers.values():
            fill(buffer, np.full(buffer.nbytes, 0xA5, np.uint8))
        spill.get(buffers).result()
        assert all(np.array_equal(content(buffers[n]), values[n]) for n in sizes)
        where = spill.location("odd")[0]
        with open(where.path, "r+b") as file:
            file.seek(where.offset + 69_000)
            byte = file.read(1)[0]
            file.seek(where.offset + 69_000)
            file.write(bytes([byte ^ 0x10]))
        try:
            spill.get(buffers).result()
        except CorruptError as error:
            assert error.names == ("odd",), error.names
        else:
            raise AssertionError("a flipped bit was not noticed")
        spill.get({"small": buffers["small"], "large": buffers["large"]}).result()
        spill.put({"odd": buffers["odd"]}).result()
        spill.get(buffers).result()
        for buffer in buffers.values():
            buffer.release()
"""


@pytest.mark.parametrize("backend", [pytest.param("aio", marks=pytest.mark.thorough), "gds"])
def test_a_flipped_bit_is_found_and_named(backend, tmp_path):
    try:
        chosen = lane("cufile")
    except UnavailableError as error:
        pytest.skip(str(error))
    ended = run_python(chosen, _VERIFIED, str(tmp_path), backend, flags=("-W", "error"))
    assert ended.returncode == 0, ended.errors
