"""Staging blocks: page-locked host memory, taken once, given out block by block."""

from __future__ import annotations

from collections.abc import Callable

from tensorspill.errors import BrokenError
from tensorspill.host_fallback.device.options import LEAST_BLOCKS, StagedOptions
from tensorspill.pool.cuda.streams import Event
from tensorspill.pool.slab import Slab

__all__ = ["Blocks"]


class Blocks:
    """The staging blocks of an engine; used by one thread, with the device's context current.

    Parameters
    ----------
    options : StagedOptions
    device : int
        Number of the GPU.
    note : callable
        Receives a line for each limit that was met.

    Attributes
    ----------
    nbytes : int
        Memory of all blocks.
    count : int
        How many there are.

    Raises
    ------
    BrokenError
        There is no memory for two blocks.
    """

    def __init__(self, options: StagedOptions, device: int, note: Callable[[str], None]) -> None:
        self._size = options.staging_block
        self._slab = _slab(options, note)
        self.nbytes = self._slab.nbytes
        self.count = self.nbytes // self._size
        self._free = list(range(self.count))
        # One for each block, recorded anew for each copy to or from it.
        self.events = [Event(device) for _ in self._free]

    def address(self, block: int) -> int:
        """Return where a block begins."""
        return self._slab.address + block * self._size

    def take(self) -> int | None:
        """Return the number of a free block, or None."""
        return self._free.pop() if self._free else None

    def give_back(self, block: int) -> None:
        """Take a block back."""
        self._free.append(block)

    def close(self) -> None:
        """Free the memory; nothing may be under way."""
        for event in self.events:
            event.close()
        self._slab.close()


def _slab(options: StagedOptions, note: Callable[[str], None]) -> Slab:
    """Return as much memory as there is, up to what was asked for."""
    wanted = blocks = options.staging_bytes // options.staging_block
    while True:
        try:
            slab = Slab(blocks * options.staging_block, numa_node=options.numa_node)
        except (BrokenError, MemoryError):
            if blocks <= LEAST_BLOCKS:
                raise
            blocks = max(LEAST_BLOCKS, blocks // 2)
        else:
            break
    if blocks < wanted:
        note(f"memory for {blocks} of {wanted} blocks of {options.staging_block} bytes")
    for why in slab.notes:
        note(why)
    return slab
