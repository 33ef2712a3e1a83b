"""Page-aligned, page-locked tensors, which all handles of a process know, as DeepSpeed has it."""

from __future__ import annotations

import threading

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool import Slab

__all__ = ["PinnedTensors", "pinned_tensors"]


class PinnedTensors:
    """Host tensors by their address.

    A tensor that was freed stays valid as long as anybody uses its memory; it is only no longer
    locked, nor known.
    """

    def __init__(self) -> None:
        self._slabs: dict[int, Slab] = {}
        self._lock = threading.Lock()

    def allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new 1-D tensor of zeros, page-locked where there is a CUDA driver.

        Raises
        ------
        UnsupportedError
            The number is negative.
        BrokenError
            There is no memory.
        """
        if numel < 0:
            raise UnsupportedError(f"A tensor can't have {numel} elements")
        slab = Slab(numel * dtype.itemsize)
        tensor = slab.tensor.view(dtype)
        self.adopt(slab)
        return tensor

    def adopt(self, slab: Slab) -> None:
        """Count a slab's memory as pinned, until it is freed."""
        with self._lock:
            self._slabs[slab.address] = slab

    def free(self, address: int) -> bool:
        """Let go of the memory that begins at `address`; False if it was not allocated here."""
        with self._lock:
            slab = self._slabs.pop(address, None)
        if slab is None:
            return False
        slab.close()
        return True

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether all of a tensor lies in memory that was allocated here."""
        if not tensor.is_cpu:
            return False
        begin = tensor.data_ptr()
        end = begin + tensor.nbytes
        with self._lock:
            slabs = list(self._slabs.values())
        return any(s.address <= begin and end <= s.address + s.nbytes for s in slabs)


#: Of this process.
pinned_tensors = PinnedTensors()
