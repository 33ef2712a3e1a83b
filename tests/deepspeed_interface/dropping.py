"""A handle that leaves out every second write, to show that a job would notice."""

import itertools

import torch

from tensorspill.deepspeed import AioHandle

_count = itertools.count()


class DroppingHandle(AioHandle):
    def async_pwrite(
        self,
        buffer: torch.Tensor,
        filename: str | int | None = None,
        file_offset: int = 0,
        *,
        fd: int | None = None,
    ) -> int:
        # The first write of a file has to be, or it can't be read at all.
        if next(_count) % 2 and not isinstance(filename, int | None):
            buffer = torch.zeros_like(buffer)
        return super().async_pwrite(buffer, filename, file_offset, fd=fd)
