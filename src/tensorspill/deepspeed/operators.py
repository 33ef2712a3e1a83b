"""What DeepSpeed's builders load in place of its compiled operators."""

from __future__ import annotations

from types import ModuleType

import torch

from tensorspill.deepspeed.handle import AioHandle, GdsHandle
from tensorspill.deepspeed.pinned import pinned_tensors

__all__ = ["PinHandle", "modules"]


class PinHandle:
    """DeepSpeed's ``pin_handle``: page-locked tensors, which the other handles know as well."""

    def new_cpu_locked_tensor(self, num_elem: int, example_tensor: torch.Tensor) -> torch.Tensor:
        """Return a new page-aligned tensor of zeros, of the example's dtype."""
        return pinned_tensors.allocate(num_elem, example_tensor.dtype)

    def free_cpu_locked_tensor(self, locked_tensor: torch.Tensor) -> bool:
        """Let go of such a tensor; False if it is none."""
        return pinned_tensors.free(locked_tensor.data_ptr())

    def free_cpu_locked_tensor_by_ptr(self, address: int) -> bool:
        """Let go of the tensor that begins at an address; False if there is none."""
        return pinned_tensors.free(address)

    def is_pinned(self, buffer: torch.Tensor) -> bool:
        """Whether a buffer is page-locked, or allocated by `new_cpu_locked_tensor`."""
        return pinned_tensors.knows(buffer) or bool(buffer.is_pinned())


def modules() -> dict[str, ModuleType]:
    """Return a module for each operator's name."""
    async_io = ModuleType("tensorspill_async_io", "DeepSpeed's async_io on tensorspill.")
    vars(async_io).update(
        aio_handle=AioHandle, aio_read=_aio_read, aio_write=_aio_write, deepspeed_memcpy=_memcpy
    )
    gds = ModuleType("tensorspill_gds", "DeepSpeed's gds on tensorspill.")
    vars(gds).update(gds_handle=GdsHandle)
    pin_memory = ModuleType("tensorspill_pin_memory", "DeepSpeed's pin_memory on tensorspill.")
    vars(pin_memory).update(pin_handle=PinHandle)
    return {"async_io": async_io, "gds": gds, "pin_memory": pin_memory}


def _aio_read(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    return AioHandle(block_size, queue_depth, single_submit, overlap_events).read(
        buffer, filename, validate
    )


def _aio_write(
    buffer: torch.Tensor,
    filename: str,
    block_size: int,
    queue_depth: int,
    single_submit: bool,
    overlap_events: bool,
    validate: bool,
) -> int:
    return AioHandle(block_size, queue_depth, single_submit, overlap_events).write(
        buffer, filename, validate
    )


def _memcpy(dest: torch.Tensor, src: torch.Tensor) -> int:
    dest.copy_(src)
    return 0
