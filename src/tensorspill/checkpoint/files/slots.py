"""Staging memory that is filled with what follows one another in a file."""

from __future__ import annotations

import torch

from tensorspill.checkpoint.files.pipeline import Pipeline
from tensorspill.checkpoint.files.records import LARGEST_SPAN
from tensorspill.errors import CapacityError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.sizes import round_down

__all__ = ["SLOT", "Slot", "allocate"]

#: Bytes that are filled and moved at a time, where the staging memory is large enough.
SLOT = 8 << 20


def allocate(staging: BufferPool, pipeline: Pipeline, slack: int = 0) -> Buffer:
    """Return staging memory, waiting for transfers that have some.

    Parameters
    ----------
    staging : BufferPool
    pipeline : Pipeline
        Whose transfers these are.
    slack : int
        Bytes beyond whole spans of digests.

    Raises
    ------
    CapacityError
        The pool is smaller than what one digest is of.
    """
    half = round_down(staging.capacity // 2, LARGEST_SPAN)
    nbytes = min(SLOT, max(half, LARGEST_SPAN)) + slack
    while True:
        try:
            return staging.allocate(nbytes)
        except CapacityError:
            if not pipeline.retire():
                # Somebody else has it; or nobody, and then this raises.
                return staging.allocate(nbytes, block=True)


class Slot:
    """A staging buffer with a position.

    Attributes
    ----------
    buffer : Buffer
    offset : int
        Where in the file its first byte belongs.
    used : int
        Bytes filled.
    """

    __slots__ = ("buffer", "offset", "used")

    def __init__(self, buffer: Buffer, offset: int = 0) -> None:
        self.buffer = buffer
        self.offset = offset
        self.used = 0

    @property
    def room(self) -> int:
        """Bytes not filled."""
        return self.buffer.nbytes - self.used

    def take(self, nbytes: int) -> torch.Tensor:
        """Return the next `nbytes`."""
        memory = self.buffer.tensor[self.used : self.used + nbytes]
        self.used += nbytes
        return memory
