"""What this process holds: memory, descriptors, threads, AIO contexts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Holdings", "holdings"]

_SELF = Path("/proc/self")


@dataclass(frozen=True, slots=True)
class Holdings:
    """A look at the process.

    Attributes
    ----------
    resident, locked, mapped : int
        Bytes of memory that is there, that is locked, and of all addresses in use.
    descriptors, threads, contexts : int
        Open files, threads, and contexts of Linux AIO.
    """

    resident: int
    locked: int
    mapped: int
    descriptors: int
    threads: int
    contexts: int

    def since(self, before: Holdings) -> Holdings:
        """Return what was added since an earlier look."""
        return Holdings(
            *(getattr(self, name) - getattr(before, name) for name in Holdings.__slots__)
        )


def holdings() -> Holdings:
    """Look at this process now."""
    status = dict(
        line.split(":", 1) for line in (_SELF / "status").read_text().splitlines() if ":" in line
    )
    return Holdings(
        resident=_kilobytes(status["VmRSS"]),
        locked=_kilobytes(status["VmLck"]),
        mapped=_kilobytes(status["VmSize"]),
        descriptors=len(os.listdir(_SELF / "fd")),
        threads=len(os.listdir(_SELF / "task")),
        # The kernel maps each context's ring of events.
        contexts=(_SELF / "maps").read_text().count("[aio]"),
    )


def _kilobytes(text: str) -> int:
    return int(text.split()[0]) << 10
