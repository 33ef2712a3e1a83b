"""Options of the AIO engine."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.errors import UnsupportedError
from tensorspill.pool.numa import check_node

__all__ = ["AioOptions"]

#: Largest transfer of one system call (``MAX_RW_COUNT`` in the kernel), rounded down to 1 GiB.
LARGEST_BLOCK = 1 << 30
PAGE = 4096


@dataclass(frozen=True, slots=True)
class AioOptions:
    """How the AIO engine cuts and queues.

    Attributes
    ----------
    block_bytes : int
        Bytes of one I/O operation; a multiple of 4096, at most 1 GiB.
    depth : int
        Operations under way at a time, for each thread.
    threads : int
        Threads that submit and copy; one keeps up with one drive. Files without O_DIRECT get at
        least `BUFFERED_THREADS` unless this option was given.
    direct : {"auto", "yes", "no"}
        O_DIRECT where the file system has it, always (else opening fails), or never.
    numa_node : int, optional
        Run the threads on the CPUs of this NUMA node and take staging memory from it.
    """

    block_bytes: int = 1 << 20
    depth: int = 32
    threads: int = 1
    direct: str = "auto"
    numa_node: int | None = None

    def __post_init__(self) -> None:
        if self.numa_node is not None:
            check_node(self.numa_node)
        checks = (
            (
                PAGE <= self.block_bytes <= LARGEST_BLOCK and self.block_bytes % PAGE == 0,
                f"block_bytes must be a multiple of {PAGE} up to 1 GiB, not {self.block_bytes}",
            ),
            (1 <= self.depth <= 4096, f"depth must be from 1 to 4096, not {self.depth}"),
            (1 <= self.threads <= 256, f"threads must be from 1 to 256, not {self.threads}"),
            (
                self.direct in ("auto", "yes", "no"),
                f"direct must be auto, yes or no, not {self.direct!r}",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise UnsupportedError(message)
