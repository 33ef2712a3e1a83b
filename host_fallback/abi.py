"""The kernel's AIO interface: system call numbers and structures.

Sources: ``asm/unistd.h`` of each architecture and ``linux/aio_abi.h`` (Linux 6.x). The structures
are the same on every 64-bit little-endian architecture.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass

import numpy as np

from tensorspill.errors import UnsupportedError

__all__ = ["EVENT", "IOCB", "PREAD", "PREADV", "PWRITE", "PWRITEV", "SystemCalls", "system_calls"]


@dataclass(frozen=True, slots=True)
class SystemCalls:
    """Numbers of the system calls that libc has no wrapper for."""

    io_setup: int
    io_destroy: int
    io_getevents: int
    io_submit: int
    statx: int
    openat: int


_BY_ARCHITECTURE = {
    "x86_64": SystemCalls(206, 207, 208, 209, 332, 257),
    "aarch64": SystemCalls(
        io_setup=0, io_destroy=1, io_getevents=4, io_submit=2, statx=291, openat=56
    ),
}

#: ``struct iocb``.
IOCB = np.dtype(
    [
        ("data", "u8"),
        ("key", "u4"),
        ("rw_flags", "u4"),
        ("opcode", "u2"),
        ("priority", "i2"),
        ("fd", "u4"),
        ("addr", "u8"),
        ("nbytes", "u8"),
        ("offset", "i8"),
        ("reserved", "u8"),
        ("flags", "u4"),
        ("event_fd", "u4"),
    ]
)

#: ``struct io_event``: `data` of the iocb, its address, and the result (bytes, or -errno).
EVENT = np.dtype([("data", "u8"), ("iocb", "u8"), ("res", "i8"), ("res2", "i8")])

#: ``IOCB_CMD_PREAD`` and ``IOCB_CMD_PWRITE``, and ``IOCB_CMD_PREADV`` and ``IOCB_CMD_PWRITEV``.
PREAD, PWRITE = 0, 1
PREADV, PWRITEV = 7, 8


def system_calls(machine: str | None = None) -> SystemCalls:
    """Return the table for an architecture, by default that of this machine.

    Raises
    ------
    UnsupportedError
        The architecture is not in the table.
    """
    machine = machine or platform.machine()
    try:
        return _BY_ARCHITECTURE[machine]
    except KeyError:
        known = ", ".join(_BY_ARCHITECTURE)
        raise UnsupportedError(f"No AIO system calls known for {machine}; known: {known}") from None
