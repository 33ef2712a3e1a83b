"""An AIO context of the kernel and the arrays of its ring."""

from __future__ import annotations

import ctypes
import errno
import logging
from collections.abc import Callable

import numpy as np

from tensorspill.errors import BrokenError
from tensorspill.host_fallback.abi import system_calls
from tensorspill.host_fallback.options import AioOptions
from tensorspill.host_fallback.ring_state import FREE_STAGING, new_ring
from tensorspill.pool.numa import bind_thread
from tensorspill.pool.slab import Slab

__all__ = ["Context", "set_up", "tear_down"]

log = logging.getLogger(__name__)

#: Staging blocks of a ring: enough to keep a drive busy while one block is copied.
STAGING_BLOCKS = 16


def set_up(depth: int) -> tuple[int, int]:
    """Create a kernel context for `depth` operations, or fewer if the kernel has no room.

    Returns
    -------
    context, depth : int
        The identifier and the depth it holds; 0 and 0 where AIO is refused altogether.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    number = ctypes.c_long(system_calls().io_setup)
    while depth >= 1:
        context = ctypes.c_ulong(0)
        if libc.syscall(number, ctypes.c_uint(depth), ctypes.byref(context)) == 0:
            if _usable(context):
                return context.value, depth
            tear_down(context.value)
            break
        if ctypes.get_errno() != errno.EAGAIN:
            break
        depth //= 2
    return 0, 0


def _usable(context: ctypes.c_ulong) -> bool:
    """Whether the other calls are allowed as well: a filter may refuse any of them."""
    libc = ctypes.CDLL(None, use_errno=True)
    nothing = ctypes.c_long(0)
    return all(
        libc.syscall(ctypes.c_long(number), context, nothing, nothing, nothing, nothing) == 0
        for number in (system_calls().io_submit, system_calls().io_getevents)
    )


def tear_down(context: int) -> None:
    """Destroy a kernel context; the kernel waits for what is under way."""
    libc = ctypes.CDLL(None, use_errno=True)
    if context and libc.syscall(ctypes.c_long(system_calls().io_destroy), ctypes.c_ulong(context)):
        code = ctypes.get_errno()
        log.warning("io_destroy failed: %s", BrokenError.from_errno(code, "io_destroy failed"))


class Context:
    """A ring with the memory that belongs to it; made and used by one thread.

    Parameters
    ----------
    options : AioOptions
    note : callable
        Receives a line for each limit that was met.

    Attributes
    ----------
    ring : Ring
        What the compiled loop works on.
    depth : int
        Operations it can have under way; 0 if the kernel refused AIO.
    """

    def __init__(self, options: AioOptions, note: Callable[[str], None]) -> None:
        self._options = options
        self._note = note
        self._staging: Slab | None = None
        if options.numa_node is not None and (why := bind_thread(options.numa_node)):
            note(why)
        context, self.depth = set_up(options.depth) if options.direct != "no" else (0, 0)
        if options.direct != "no" and self.depth < options.depth:
            note(
                f"io_setup gave depth {self.depth} of {options.depth}: fs.aio-max-nr is used up or "
                "AIO is not allowed here; depth 0 means pread and pwrite"
            )
        self.ring = new_ring(context, options.block_bytes, max(1, self.depth))

    @property
    def staging_bytes(self) -> int:
        """Memory that staging holds."""
        return 0 if self._staging is None else self._staging.nbytes

    def provide_staging(self) -> bool:
        """Allocate the staging blocks, unless they are there; not while the ring is running.

        Returns
        -------
        bool
            False if there is no memory even for one block.
        """
        if self._staging is None:
            self._staging = self._allocate()
        if self._staging is None:
            return False
        if self.ring.staging == 0:
            blocks = self._staging.nbytes // self._options.block_bytes
            self.ring.free_staging[:blocks] = np.arange(blocks)
            self.ring.state[FREE_STAGING] = blocks
            self.ring = self.ring._replace(staging=self._staging.address)
        return True

    def _allocate(self) -> Slab | None:
        """Return as many blocks as there is memory for, up to `STAGING_BLOCKS`."""
        wanted = blocks = min(STAGING_BLOCKS, len(self.ring.free))
        staging = None
        while staging is None and blocks > 0:
            try:
                staging = Slab(
                    blocks * self._options.block_bytes,
                    numa_node=self._options.numa_node,
                    page_lock="no",
                )
            except (BrokenError, MemoryError):
                blocks //= 2
        if blocks < wanted:
            self._note(
                f"memory for {blocks} of {wanted} staging blocks of {self._options.block_bytes} "
                "bytes; what needs staging goes through the page cache if there is none"
            )
        for why in staging.notes if staging is not None else ():
            self._note(why)
        return staging

    def close(self) -> None:
        """Destroy the kernel context and free staging; a second time does no harm."""
        context, self.ring = self.ring.context, self.ring._replace(context=0)
        tear_down(context)
        if self._staging is not None:
            self._staging.close()
            self._staging = None
