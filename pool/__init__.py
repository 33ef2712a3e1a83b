"""Memory of the host and of GPUs: slabs, pools of buffers, the allocator of extents, digests.

Importing this takes memory from nobody and initialises nothing.
"""

from tensorspill.pool.allocator import ExtentAllocator
from tensorspill.pool.arena import PoolStatistics
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.buffer_pool import BufferPool
from tensorspill.pool.digest import digest
from tensorspill.pool.reservation import Reservation
from tensorspill.pool.sizes import format_bytes, parse_bytes
from tensorspill.pool.slab import Slab

__all__ = [
    "Buffer",
    "BufferPool",
    "ExtentAllocator",
    "PoolStatistics",
    "Reservation",
    "Slab",
    "digest",
    "format_bytes",
    "parse_bytes",
]
