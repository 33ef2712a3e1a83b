"""Spill files and pools of GPU memory."""

import os

import numpy as np
import pytest
import torch

from tensorspill import SpillFile
from tensorspill.errors import ClosedError, UnsupportedError
from tensorspill.pool import Buffer, BufferPool
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import call


def store(buffer: Buffer) -> np.ndarray:
    content = np.frombuffer(os.urandom(buffer.nbytes), "u1")
    with current(0):
        call("cuMemcpyHtoD", buffer.address, content.ctypes.data, buffer.nbytes)
    return content


def load(buffer: Buffer) -> np.ndarray:
    content = np.zeros(buffer.nbytes, "u1")
    with current(0):
        call("cuMemcpyDtoH", content.ctypes.data, buffer.address, buffer.nbytes)
    return content


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_buffers_there_and_back(tmp_path, dtype):
    with (
        BufferPool("16MiB", "cuda:0", poison=True) as pool,
        SpillFile(tmp_path, device="cuda", backend="aio") as spill,
    ):
        assert str(spill.device) == "cuda:0"
        buffers = {f"t{i}": pool.allocate((7, 100 + i), dtype) for i in range(40)}
        contents = {name: store(buffer) for name, buffer in buffers.items()}
        spill.put(buffers).result()
        for buffer in buffers.values():
            buffer.release()
        back = {f"t{i}": pool.allocate((7, 100 + i), dtype) for i in range(40)}
        spill.get(back).result()
        for name, buffer in back.items():
            assert (load(buffer) == contents[name]).all()
        assert spill.meta("t3").dtype is dtype
        assert spill.meta("t3").shape == (7, 103)
        wrong = pool.allocate(3)
        with pytest.raises(UnsupportedError):
            spill.get({"t0": wrong})
        wrong.release()
        with pytest.raises(ClosedError):
            spill.put({"t0": wrong})


def test_what_a_spill_file_refuses(tmp_path):
    with (
        BufferPool("1MiB", "cuda:1") as other,
        BufferPool("1MiB", "cuda:0") as pool,
        SpillFile(tmp_path, device="cuda:0", backend="aio") as spill,
    ):
        for bad in (torch.zeros(3), other.allocate(3), object()):
            with pytest.raises(UnsupportedError):
                spill.put({"x": bad})  # type: ignore[dict-item]
        with pytest.raises(UnsupportedError):
            spill.put({3: pool.allocate(3)})  # type: ignore[dict-item]
        assert len(spill) == 0
