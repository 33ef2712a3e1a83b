"""Options of the GDS engine."""

from __future__ import annotations

from dataclasses import dataclass

from tensorspill.errors import UnsupportedError

__all__ = ["PAGE", "GdsOptions"]

#: cuFile moves whole pages of this size; what is smaller goes through its own buffers.
PAGE = 4096
LARGEST_BLOCK = 1 << 30


@dataclass(frozen=True, slots=True)
class GdsOptions:
    """How the GDS engine cuts, queues and chooses.

    kvikio has one pool of threads and one threshold for the whole process: while several engines
    are open, the largest number of threads holds, and the threshold and `direct` of the engine that
    was opened first. When the last is closed, kvikio has back what it had.

    Attributes
    ----------
    block_bytes : int
        Bytes of one operation; a multiple of 4096, at most 1 GiB.
    depth : int
        Operations of a batch under way at a time.
    threads : int
        Threads of kvikio's pool.
    direct : {"auto", "yes", "no"}
        O_DIRECT in compatibility mode where the file system has it, always (else opening fails), or
        never.
    compat : {"auto", "yes", "no"}
        Whether kvikio moves the bytes itself, through host memory: as kvikio decides (see its
        ``KVIKIO_COMPAT_MODE``), always, or never.
    stream_ordered : {"auto", "yes", "no"}
        Whether a CUDA stream runs the operations, in order with the caller's: where cuFile can and
        the caller's stream or the default stream is busy, wherever cuFile can, or never. Without,
        transfers wait for all work that is on the default stream, since kvikio does.
    threshold_bytes : int
        Smaller operations go through host memory; at least 8192, so that no two of them change the
        same page of a file behind each other's back.
    registered_bytes : int
        Device memory that may be registered with cuFile at a time; 0 for none.
    """

    block_bytes: int = 4 << 20
    depth: int = 64
    threads: int = 8
    direct: str = "auto"
    compat: str = "auto"
    stream_ordered: str = "auto"
    threshold_bytes: int = 16 << 10
    registered_bytes: int = 1 << 40

    def __post_init__(self) -> None:
        words = ("auto", "yes", "no")
        checks = (
            (
                PAGE <= self.block_bytes <= LARGEST_BLOCK and self.block_bytes % PAGE == 0,
                f"block_bytes must be a multiple of {PAGE} up to 1 GiB, not {self.block_bytes}",
            ),
            (1 <= self.depth <= 4096, f"depth must be from 1 to 4096, not {self.depth}"),
            (1 <= self.threads <= 256, f"threads must be from 1 to 256, not {self.threads}"),
            (self.direct in words, f"direct must be auto, yes or no, not {self.direct!r}"),
            (self.compat in words, f"compat must be auto, yes or no, not {self.compat!r}"),
            (
                self.stream_ordered in words,
                f"stream_ordered must be auto, yes or no, not {self.stream_ordered!r}",
            ),
            (
                self.threshold_bytes >= 2 * PAGE,
                f"threshold_bytes must be at least {2 * PAGE}, not {self.threshold_bytes}",
            ),
            (
                self.registered_bytes >= 0,
                f"registered_bytes can't be negative, not {self.registered_bytes}",
            ),
        )
        for holds, message in checks:
            if not holds:
                raise UnsupportedError(message)
