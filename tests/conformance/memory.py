"""Where the buffers of the suite are: host memory, or a GPU's, as several libraries have it.

A buffer is what a `Request` takes: bytes in one dimension that can be sliced. Which memory it is in
is the same for all tests of a process, since all lanes of a process are for one device.
"""

from __future__ import annotations

import os
from typing import Any, Protocol

import numpy as np
import torch

__all__ = ["LANE_VARIABLE", "MEMORY", "Memory"]

#: "cuda-torch" and "cuda-cupy" run the suite on a GPU; a lane of `tests.standin` has its own.
VARIABLE = "TENSORSPILL_TEST_MEMORY"

#: Set in processes that run on the stand-ins; says in which lane.
LANE_VARIABLE = "STANDIN_LANE"


class Memory(Protocol):
    """Makes buffers of one kind and copies bytes to and from them."""

    #: For `open_engine`.
    device: str
    #: Whether buffers are tensors of torch.
    tensors: bool
    #: Whether this is the stand-in driver of `tests.standin`.
    standin: bool

    def empty(self, nbytes: int) -> Any:
        """Return a buffer of at least one byte."""

    def address(self, buffer: Any) -> int:
        """Return where a buffer starts."""

    def store(self, buffer: Any, content: torch.Tensor) -> None:
        """Fill a buffer with bytes of host memory."""

    def load(self, buffer: Any) -> torch.Tensor:
        """Return a buffer's bytes in host memory."""

    def around(self, buffer: Any, nbytes: int) -> Any:
        """Return what a buffer is a slice of, `nbytes` more on either side."""


class Tensors:
    """Tensors of torch."""

    tensors = True
    standin = False

    def __init__(self, device: str) -> None:
        self.device = device

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def address(self, buffer: torch.Tensor) -> int:
        return buffer.data_ptr()

    def store(self, buffer: torch.Tensor, content: torch.Tensor) -> None:
        buffer.copy_(content)

    def load(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.cpu()

    def around(self, buffer: torch.Tensor, nbytes: int) -> torch.Tensor:
        start = buffer.storage_offset() - nbytes
        return buffer.as_strided((len(buffer) + 2 * nbytes,), (1,), start)


class DeviceArrays:
    """Memory of the stand-in driver, allocated through cuda-python."""

    device = "cuda:0"
    tensors = False
    standin = True

    def empty(self, nbytes: int) -> Any:
        from tests.standin.arrays import DeviceArray

        return DeviceArray(nbytes)

    def address(self, buffer: Any) -> int:
        return int(buffer.address)

    def store(self, buffer: Any, content: torch.Tensor) -> None:
        buffer.store(content.numpy())

    def load(self, buffer: Any) -> torch.Tensor:
        return torch.from_numpy(buffer.load())

    def around(self, buffer: Any, nbytes: int) -> Any:
        return buffer.around(nbytes)


class CupyArrays:
    """Arrays of CuPy, in the memory of its pool."""

    device = "cuda:0"
    tensors = False
    standin = False

    def empty(self, nbytes: int) -> Any:
        import cupy

        return cupy.empty(nbytes, np.uint8)

    def address(self, buffer: Any) -> int:
        return int(buffer.data.ptr)

    def store(self, buffer: Any, content: torch.Tensor) -> None:
        buffer.set(content.numpy())

    def load(self, buffer: Any) -> torch.Tensor:
        return torch.from_numpy(buffer.get())

    def around(self, buffer: Any, nbytes: int) -> Any:
        import cupy

        pointer = cupy.cuda.MemoryPointer(
            buffer.data.mem, buffer.data.ptr - buffer.data.mem.ptr - nbytes
        )
        return cupy.ndarray(buffer.size + 2 * nbytes, np.uint8, pointer)


def _memory() -> Memory:
    if LANE_VARIABLE in os.environ:
        return DeviceArrays()
    name = os.environ.get(VARIABLE, "host")
    if name == "cuda-cupy":
        return CupyArrays()
    return Tensors({"host": "cpu", "cuda-torch": "cuda:0"}[name])


MEMORY: Memory = _memory()
