"""What O_DIRECT demands of addresses, offsets and sizes on the file system of an open file."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass

from tensorspill.host_fallback.abi import system_calls

__all__ = ["Alignment", "find_alignment", "is_paravirtual"]

#: Used where nothing tells: right for every drive sold today, and a refusal is survived anyway.
CAUTIOUS = 4096

# linux/stat.h
_AT_EMPTY_PATH = 0x1000
_STATX_DIOALIGN = 0x2000
#: ``struct statx``: its mask, and at 0x98 the alignments of memory and offsets.
_STATX = struct.Struct("=I148xII96x")


@dataclass(frozen=True, slots=True)
class Alignment:
    """Multiples, in bytes, that direct I/O needs.

    Attributes
    ----------
    memory : int
        Of the memory address.
    offset : int
        Of the file offset and of the size.
    source : str
        Who said so: "statx", "sysfs", "probe" or "assumed".
    """

    memory: int
    offset: int
    source: str


def find_alignment(fd: int) -> Alignment | None:
    """Return the alignment that direct I/O on `fd` needs, or None if there is no direct I/O.

    Parameters
    ----------
    fd : int
        Open with O_DIRECT.
    """
    found, alignment = _from_statx(fd)
    if found:
        return alignment
    return _from_sysfs(fd) or _from_probe(fd) or Alignment(CAUTIOUS, CAUTIOUS, "assumed")


def is_paravirtual(fd: int) -> bool:
    """Whether the drive below is one that a hypervisor lends (virtio).

    On such a drive 1 GiB of memory in pages of 4 KiB moved at 0.6 of the rate that it had through
    staging blocks, which are in huge pages (benchmarks/host_path.py). Drives of the machine's own
    were not measured.
    """
    return _is_below_virtio(os.fstat(fd).st_dev)


@functools.cache
def _is_below_virtio(device: int) -> bool:
    """Follow a device's place in sysfs; once, since that is a dozen system calls."""
    return "/virtio" in os.path.realpath(_in_sysfs(device))


def _in_sysfs(device: int) -> str:
    """Return the place in sysfs of the block device that files are on; there may be none."""
    return f"/sys/dev/block/{os.major(device)}:{os.minor(device)}"


def _from_statx(fd: int) -> tuple[bool, Alignment | None]:
    """Ask the file system (Linux 6.1 and later); return whether it answered, and its answer."""
    buffer = ctypes.create_string_buffer(_STATX.size)
    if _system_call()(_statx_number(), fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, buffer) != 0:
        return False, None
    mask, memory, offset = _STATX.unpack(buffer)
    if not mask & _STATX_DIOALIGN:
        return False, None
    # Both zero: this file has no direct I/O, although open() accepted the flag.
    return True, Alignment(memory, offset, "statx") if memory and offset else None


@functools.cache
def _system_call() -> Callable[..., int]:
    return ctypes.CDLL(None).syscall


@functools.cache
def _statx_number() -> ctypes.c_long:
    return ctypes.c_long(system_calls().statx)


def _from_sysfs(fd: int) -> Alignment | None:
    """Take the logical block size of the block device below, a partition's from its drive."""
    folder = _in_sysfs(os.fstat(fd).st_dev)
    for queue in (f"{folder}/queue", f"{folder}/../queue"):
        try:
            with open(f"{queue}/logical_block_size", encoding="ascii") as file:
                size = int(file.read())
        except (OSError, ValueError):
            continue
        return Alignment(size, size, "sysfs")
    return None


def _from_probe(fd: int) -> Alignment | None:
    """Try ever larger reads inside the file; None if it is too short to tell."""
    if os.fstat(fd).st_size < 2 * CAUTIOUS:
        return None
    with mmap.mmap(-1, 3 * CAUTIOUS) as memory, memoryview(memory) as view:
        for size in (512, 1024, 2048):
            try:
                os.preadv(fd, [view[size : 2 * size]], size)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    return None
            else:
                return Alignment(size, size, "probe")
    return None
