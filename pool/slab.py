"""A slab: one page-aligned range of host memory."""

from __future__ import annotations

import errno
import mmap
import weakref
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.errors import BrokenError, ClosedError, UnsupportedError
from tensorspill.pool.numa import check_node, prefer_node
from tensorspill.pool.page_lock import PageLock
from tensorspill.pool.shapes import shaped
from tensorspill.pool.sizes import format_bytes

__all__ = ["HUGE_PAGE", "PageLocking", "Slab"]

PageLocking = Literal["auto", "yes", "no"]

HUGE_PAGE = 2 << 20
_THP = "/sys/kernel/mm/transparent_hugepage/enabled"


class Slab:
    """Anonymous host memory, zeroed, that lives until the slab and all its tensors are gone.

    Parameters
    ----------
    nbytes : int
        Size. What is reserved exceeds it by less than a page, and from 2 MiB on by 2 MiB of
        addresses without memory behind them.
    huge_pages : bool
        Advise the kernel to use huge pages, if the slab is at least one.
    numa_node : int, optional
        Take the pages from this NUMA node, as long as it has any.
    page_lock : {"auto", "yes", "no"}
        Register the memory with the CUDA driver if possible, or raise if not, or don't. It takes
        the thread's CUDA context or, if there is none, the primary context of this rank's own GPU
        (environment variable ``LOCAL_RANK``). The kernel provides all pages at once then.
    alignment : int
        Least power of two that the address is a multiple of, at most 2 MiB. It is a page at least,
        and 2 MiB for slabs of that size or larger.

    Attributes
    ----------
    address, nbytes : int
        The range.
    device : torch.device
        The CPU.
    page_locked : bool
        Whether the CUDA driver has it registered.
    notes : tuple of str
        What was not possible, and why.

    Raises
    ------
    UnsupportedError
        The size is negative; there is no such NUMA node; ``page_lock="yes"`` is not possible.
    BrokenError
        The operating system has no such memory.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        nbytes: int,
        huge_pages: bool = True,
        numa_node: int | None = None,
        page_lock: PageLocking = "auto",
        *,
        alignment: int = mmap.PAGESIZE,
    ) -> None:
        _check(nbytes, numa_node, page_lock, alignment)
        notes: list[str] = []
        step = max(alignment, HUGE_PAGE if nbytes >= HUGE_PAGE else mmap.PAGESIZE)
        mapping = _map(nbytes, step)
        if huge_pages and nbytes >= HUGE_PAGE:
            _advise_huge_pages(mapping, notes)
        whole = np.frombuffer(mapping, np.uint8)
        lead = -whole.ctypes.data % step
        self.nbytes = nbytes
        self.address = int(whole.ctypes.data) + lead
        # numpy, not torch, holds on to the mapping: torch.frombuffer lets go of the buffer's
        # export, so that the mapping could be closed under a tensor.
        self._array: NDArray[np.uint8] | None = whole[lead : lead + nbytes]
        if numa_node is not None and nbytes:
            notes.extend(filter(None, [prefer_node(self.address, nbytes, numa_node)]))
        self._lock = _lock_pages(self._array, page_lock, notes)
        self.page_locked = self._lock is not None
        self.notes = tuple(notes)
        if self._lock is not None:
            self._unlock = weakref.finalize(self, self._lock.release)
            self._unlock.atexit = False

    @property
    def array(self) -> NDArray[np.uint8]:
        """The memory as a numpy array; arrays and tensors made from it keep it mapped.

        Raises
        ------
        ClosedError
            The slab was closed.
        """
        if self._array is None:
            raise ClosedError("The slab is closed")
        return self._array

    @property
    def tensor(self) -> torch.Tensor:
        """The memory as a 1-D uint8 tensor, whose storage keeps it mapped.

        Raises
        ------
        ClosedError
            The slab was closed.
        """
        return torch.from_numpy(self.array)

    def part(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a range of the memory, which keeps it mapped.

        Raises
        ------
        ClosedError
            The slab was closed.
        """
        return self.array[offset : offset + nbytes]

    def shaped(self, part: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over exactly a `part`, whose storage holds it."""
        return shaped(part, shape, dtype)

    def fill(self, offset: int, nbytes: int, value: int) -> None:
        """Set `nbytes` from `offset` on to `value`."""
        self.part(offset, nbytes).fill(value)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._array is None

    def close(self) -> None:
        """Unregister the memory and give it up; a second time does no harm.

        The memory is unmapped when no tensor and no array uses it any more.
        """
        self._array = None
        if self._lock is not None:
            self._unlock()
        self.page_locked = False

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
        state = "closed" if self.closed else "page-locked" if self.page_locked else "pageable"
        return f"<Slab {format_bytes(self.nbytes)} at {self.address:#x}, {state}>"


def _check(nbytes: int, node: int | None, page_lock: str, alignment: int) -> None:
    if nbytes < 0:
        raise UnsupportedError(f"A slab can't have {nbytes} bytes")
    if not 0 < alignment <= HUGE_PAGE or alignment & (alignment - 1):
        raise UnsupportedError(f"An alignment must be a power of two up to 2 MiB, not {alignment}")
    if page_lock not in ("auto", "yes", "no"):
        raise UnsupportedError(f"page_lock is auto, yes or no, not {page_lock!r}")
    if node is not None:
        check_node(node)


def _map(nbytes: int, step: int) -> mmap.mmap:
    """Map enough to find `nbytes` at a multiple of `step` in it."""
    room = max(nbytes, 1) + (step if step > mmap.PAGESIZE else 0)
    try:
        # Private: the kernel backs shared anonymous memory with tmpfs pages, rarely huge ones.
        return mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        code = getattr(error, "errno", None) or errno.ENOMEM
        raise BrokenError.from_errno(code, "Can't map this much memory", nbytes=nbytes) from error


def _advise_huge_pages(mapping: mmap.mmap, notes: list[str]) -> None:
    try:
        mapping.madvise(mmap.MADV_HUGEPAGE)
        with open(_THP) as setting:
            if "[never]" in setting.read():
                notes.append(f"No huge pages: {_THP} says never")
    except OSError as error:
        notes.append(f"No huge pages: {error}")


def _lock_pages(
    memory: NDArray[np.uint8], page_lock: PageLocking, notes: list[str]
) -> PageLock | None:
    if page_lock == "no" or memory.nbytes == 0:
        return None
    try:
        return PageLock(memory)
    except UnsupportedError as error:
        if page_lock == "yes":
            raise
        notes.append(str(error))
        return None
