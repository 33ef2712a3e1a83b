"""Digests of GPU memory of which torch has no tensors: copied to the host, and computed there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.cuda.arrays import ArrayMemory, memory_of
from tensorspill.pool.cuda.contexts import current
from tensorspill.pool.cuda.driver import call
from tensorspill.pool.cuda.streams import Event, Stream, current_stream
from tensorspill.pool.digest import digest

__all__ = ["begin_copies"]


def begin_copies(arrays: Sequence[Any], after_current: bool) -> Callable[[], list[int]]:
    """Return what copies arrays and returns their digests, one after the other.

    Parameters
    ----------
    arrays : sequence of CUDA arrays
        All on one device; see `tensorspill.pool.cuda.arrays.memory_of`.
    after_current : bool
        Whether what the current stream of the device is doing now comes first.

    Raises
    ------
    UnsupportedError
        They are not contiguous, or on several devices.
    """
    memories = [_memory(array) for array in arrays]
    devices = {memory.device.index for memory in memories}
    if len(devices) > 1:
        raise UnsupportedError(f"Arrays on several GPUs: {sorted(devices)}")
    (index,) = devices
    ready = Event(index) if after_current else None
    if ready is not None:
        ready.record(current_stream(index))

    def values() -> list[int]:
        with ExitStack() as stack:
            stream = stack.enter_context(Stream(index))
            if ready is not None:
                stream.wait(stack.enter_context(ready))
            return [digest(_copied(memory, stream)) for memory in memories]

    return values


def _memory(array: Any) -> ArrayMemory:
    """Return where an array is; that of a buffer is known without asking the driver."""
    if not isinstance(array, Buffer):
        return memory_of(array)
    return ArrayMemory(array.address, array.nbytes, False, array.device, array.memory)


def _copied(memory: ArrayMemory, stream: Stream) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    content = np.empty(memory.nbytes, np.uint8)
    if memory.nbytes:
        with current(stream.device):
            # From pageable memory the driver returns when the bytes are there; it need not.
            call(
                "cuMemcpyDtoHAsync",
                content.ctypes.data,
                memory.address,
                memory.nbytes,
                stream.handle,
            )
            stream.synchronize()
    return content
