"""A pool of buffers of any size, cut from one slab of host or GPU memory."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import Self

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.allocator import ExtentAllocator
from tensorspill.pool.arena import Arena, PoolStatistics
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.cuda.memory import DeviceSlab, Resource
from tensorspill.pool.reservation import Reservation
from tensorspill.pool.shapes import Shape, count_bytes, normal_shape
from tensorspill.pool.sizes import parse_bytes, round_up
from tensorspill.pool.slab import PageLocking, Slab

__all__ = ["BufferPool", "PoolStatistics"]


class BufferPool:
    """Memory of the host or of a GPU, taken once, from which buffers of any size are cut.

    All methods may be called from any thread. A forked child has the memory's content at the time
    of the fork, but can't allocate.

    Parameters
    ----------
    nbytes : int or str
        Capacity in bytes, or text such as "4GiB"; rounded up to the alignment.
    device : str or torch.device
        "cpu", or a GPU such as "cuda:0". Buffers of GPU memory have tensors where torch has CUDA,
        and can be used by CuPy, numba and others anywhere.
    alignment : int
        Power of two from 64 to 2 MiB; every buffer's address and room are multiples of it.
    numa_node : int, optional
        Take the memory from this NUMA node; for host memory.
    page_lock : {"auto", "yes", "no"}
        See `Slab`; for host memory.
    resource : {"driver", "cupy"}
        Where GPU memory comes from: the driver itself, or the pool of CuPy's arrays.
    allocator : ExtentAllocator, optional
        Decides where in the memory buffers go; unused so far, with at most `nbytes` of capacity.
        Its alignment then counts.
    poison : bool
        Keep memory that is in no buffer filled with 0xFF, a NaN in nearly all float types, so
        that use after release, or before writing, shows. For tests.

    Attributes
    ----------
    device : torch.device
        Where the memory is.
    slab : Slab or DeviceSlab
        The memory, with its address, page-locking and notes.

    Raises
    ------
    UnsupportedError
        An argument is out of range, or there is no such GPU.
    BrokenError, CapacityError
        The operating system, or the GPU, has no such memory.
    """

    def __init__(
        self,
        nbytes: int | str,
        device: str | torch.device = "cpu",
        *,
        alignment: int = 4096,
        numa_node: int | None = None,
        page_lock: PageLocking = "auto",
        resource: Resource = "driver",
        allocator: ExtentAllocator | None = None,
        poison: bool = False,
    ) -> None:
        target = _checked_device(device)
        size = parse_bytes(nbytes)
        if allocator is None:
            allocator = ExtentAllocator(round_up(size, max(alignment, 1)), alignment)
        elif len(allocator) or allocator.capacity > size:
            raise UnsupportedError("The allocator is in use, or has more capacity than the pool")
        if allocator.alignment < 64:
            raise UnsupportedError(f"Buffers need an alignment of 64, not {allocator.alignment}")
        self.slab: Slab | DeviceSlab
        if target.type == "cuda":
            if numa_node is not None or page_lock == "yes":
                raise UnsupportedError("numa_node and page_lock are for host memory")
            alignment = allocator.alignment
            self.slab = DeviceSlab(allocator.capacity, target, resource, alignment=alignment)
        else:
            self.slab = Slab(
                allocator.capacity,
                numa_node=numa_node,
                page_lock=page_lock,
                alignment=allocator.alignment,
            )
        self.device = self.slab.device
        self._arena = Arena(self.slab, allocator, poison)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._arena.closed

    @property
    def forked(self) -> bool:
        """Whether this is a child of the process that made the pool."""
        return self._arena.forked

    @property
    def capacity(self) -> int:
        """Bytes of the pool."""
        return self._arena.allocator.capacity

    def allocate(
        self,
        shape: Shape,
        dtype: torch.dtype = torch.uint8,
        *,
        block: bool = False,
        timeout: float | None = None,
    ) -> Buffer:
        """Return a buffer that nobody else has; its content is undefined.

        Parameters
        ----------
        shape : int or sequence of int
            Any shape; one without elements takes no memory.
        dtype : torch.dtype
            Any dtype.
        block : bool
            Wait until others have released enough. Who waits is not served in order: whatever
            fits is taken.
        timeout : float, optional
            Seconds to wait at most.

        Raises
        ------
        CapacityError
            There is no room: now, or within `timeout`, or ever. Nothing changed.
        UnsupportedError
            The shape or the dtype is not possible.
        ClosedError
            The pool was closed, perhaps while this call waited, or this is a forked child.
        """
        sizes = normal_shape(shape)
        nbytes = count_bytes(sizes, dtype)
        arena = self._arena
        arena.check_open()
        if nbytes == 0:
            return arena.empty_buffer(sizes, dtype)
        with arena.changed:
            offset = arena.extent_locked(nbytes, block, timeout)
            return arena.buffer_locked(offset, sizes, dtype, nbytes)

    def reserve(self, nbytes: int | str | Iterable[int]) -> Reservation:
        """Take free space out of the reach of others, so that several buffers can be planned.

        Parameters
        ----------
        nbytes : int, str or iterable of int
            The sizes of the buffers to come: there will be room for each of them. One size is
            taken in one piece where there is such a hole, else in several, the largest first.

        Raises
        ------
        CapacityError
            There is no room; nothing changed.
        UnsupportedError
            A size is negative or no size.
        ClosedError
            The pool was closed, or this is a forked child.
        """
        if isinstance(nbytes, Iterable) and not isinstance(nbytes, str):
            sizes, scattered = [parse_bytes(size) for size in nbytes], False
        else:
            sizes, scattered = [parse_bytes(nbytes)], True
        return Reservation(self._arena, self._arena.reserve(sizes, scattered))

    def statistics(self) -> PoolStatistics:
        """Return the pool's state; works after `close` as well.

        Raises
        ------
        ClosedError
            This is a forked child.
        """
        return self._arena.statistics()

    def close(self) -> None:
        """Give up the memory; a second time does no harm.

        Buffers count as released from now on, and those who wait for one get a `ClosedError`.
        The memory stays valid, and page-locked no more, while tensors use it.

        Raises
        ------
        BusyError
            A transfer that has not ended uses the pool's memory; the pool stays open.
        """
        self._arena.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else repr(self._arena.allocator)
        return f"<BufferPool on {self.device}: {state}>"


def _checked_device(device: str | torch.device) -> torch.device:
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise UnsupportedError(f"{device!r} is no device: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"No pools on {device}")
    return device
