"""What the tests of the pool, and of those who use it, share."""

import random

import numpy as np

from tensorspill.pool.allocator import ExtentAllocator
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.holes import Holes


class RandomAllocator(ExtentAllocator):
    """Places extents anywhere, so that nothing works because slots come in a fixed order."""

    def __init__(self, capacity: int, alignment: int = 4096, seed: int | None = None) -> None:
        self.chance = random.Random(seed)
        super().__init__(capacity, alignment)

    def _choose(self, holes: Holes, size: int) -> tuple[int, int] | None:
        fitting = np.flatnonzero(holes.sizes >= size).tolist()
        if not fitting:
            return None
        index = self.chance.choice(fitting)
        places = (int(holes.sizes[index]) - size) // self.alignment + 1
        start = int(holes.starts[index]) + self.chance.randrange(places) * self.alignment
        return index, start


def check_invariants(allocator: ExtentAllocator) -> None:
    """Check that extents and holes tile the capacity, are aligned, coalesced, and counted."""
    holes = allocator._holes
    extents = allocator._extents
    starts, sizes = holes.starts, holes.sizes
    free = list(zip(starts.tolist(), sizes.tolist(), strict=True))
    ranges = sorted([*extents.items(), *free])
    position = 0
    for start, size in ranges:
        assert start == position, "a gap or an overlap"
        assert size > 0
        assert start % allocator.alignment == size % allocator.alignment == 0
        position += size
    assert position == allocator.capacity
    assert np.all(starts[1:] > starts[:-1] + sizes[:-1]), "two holes touch"
    assert allocator.allocated == sum(extents.values())
    assert allocator.free_bytes == sum(size for _, size in free)
    assert allocator.largest == max((size for _, size in free), default=0)
    assert len(allocator) == len(extents) == len(ranges) - len(holes)


def check_pool(pool: BufferPool) -> None:
    """Check a pool's accounts against its allocator's."""
    state = pool.statistics()
    allocator = pool._arena.allocator
    check_invariants(allocator)
    assert state.capacity == state.allocated + state.reserved + state.free == allocator.capacity
    assert state.reserved == sum(map(allocator.size_of, pool._arena.pieces))
    assert state.buffers + len(pool._arena.pieces) == len(allocator)
    assert state.largest <= state.free
    assert state.allocated <= state.peak_allocated <= state.capacity
