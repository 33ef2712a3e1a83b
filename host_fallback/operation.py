"""Compiled steps of one operation: copying, opening, pread and pwrite, accounting."""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
from numba import carray

from tensorspill.engine.batch import REQUEST
from tensorspill.engine.latencies import BUCKETS, FIRST_BITS, STEP_BITS
from tensorspill.host_fallback import libc
from tensorspill.host_fallback.abi import system_calls
from tensorspill.host_fallback.layout import FILE
from tensorspill.host_fallback.ring_state import NAME
from tensorspill.jit import compiled

__all__ = ["buffered", "copy", "count", "settle", "started", "stopped", "synchronous", "tables"]

_OPENAT = system_calls().openat
_NUMBER_AT, _ZERO = len(NAME), ord("0")
_EINTR, _ENODATA, _EIO = errno.EINTR, errno.ENODATA, errno.EIO

Array = np.ndarray[Any, Any]


@compiled
def started(ring: Any, path: int) -> None:
    """Account that an operation of `path` began."""
    if ring.busy[path, 0] == 0:
        ring.busy[path, 1] = libc.nanoseconds(ring.clock)
    ring.busy[path, 0] += 1


@compiled
def stopped(ring: Any, path: int) -> None:
    """Account that an operation of `path` ended."""
    ring.busy[path, 0] -= 1
    if ring.busy[path, 0] == 0:
        ring.busy[path, 2] += libc.nanoseconds(ring.clock) - ring.busy[path, 1]


@compiled
def count(ring: Any, job: int, path: int, nbytes: int, io_bytes: int, elapsed: int) -> None:
    """Account bytes that were moved, and how long it took."""
    moved = ring.moved[job, path]
    moved[0] += nbytes
    moved[1] += io_bytes
    moved[2] += 1
    moved[3] = max(moved[3], elapsed)
    ring.latency[path, _bucket(elapsed)] += 1


@compiled
def _bucket(elapsed: int) -> int:
    """Return the bucket of `engine.latencies` for nanoseconds."""
    octave = -1
    while elapsed >> (octave + FIRST_BITS + 1):
        octave += 1
    if octave < 0:
        return 0
    step = (elapsed >> (octave + FIRST_BITS - STEP_BITS)) & ((1 << STEP_BITS) - 1)
    return min(1 + (octave << STEP_BITS) + step, BUCKETS - 1)


@compiled
def tables(ring: Any, job: int) -> tuple[Array, Array]:
    """Return the requests and files of a job. Lengths are bounded by the segments' indices."""
    row = ring.jobs[job]
    requests = carray(libc.at(row.requests), 1 << 40, REQUEST)
    files = carray(libc.at(row.files), 1 << 20, FILE)
    return requests, files


@compiled
def buffered(ring: Any, job: int, number: int) -> int:
    """Return a file's descriptor without O_DIRECT, opened if need be, or minus an errno."""
    _, files = tables(ring, job)
    file = files[number]
    if file.buffered < 0:
        _write_number(ring.name, file.held)
        file.buffered = -_EINTR
        while file.buffered == -_EINTR:
            fd = libc.syscall(_OPENAT, 0, ring.name.ctypes.data, file.flags, 0, 0)
            file.buffered = fd if fd >= 0 else -libc.errno()
    return int(file.buffered)


@compiled
def _write_number(name: Array, number: int) -> None:
    """Write a number behind the folder of open files, as text that ends with a zero."""
    end = _NUMBER_AT + 1
    rest = number // 10
    while rest:
        end += 1
        rest //= 10
    name[end] = 0
    while end > _NUMBER_AT:
        end -= 1
        name[end] = _ZERO + number % 10
        number //= 10


@compiled
def copy(requests: Array, slot: Any, nbytes: int) -> int:
    """Gather (write) or scatter (read) the first `nbytes` of a staging block.

    A gathered block is zero wherever no request is. Return the bytes of callers' buffers.
    """
    moved = 0
    base, begin, write = slot.addr, slot.offset, slot.write != 0
    end = begin + nbytes
    filled = begin
    stop = min(end, slot.useful)
    for i in range(slot.request, slot.last + 1):
        row = requests[i]
        if row.offset >= stop:
            break
        low, high = max(begin, row.offset), min(stop, row.offset + row.nbytes)
        if high > low:
            inside, outside = base + low - begin, row.addr + low - row.offset
            if write:
                libc.memset(base + filled - begin, 0, low - filled)
                libc.memcpy(inside, outside, high - low)
                filled = high
            else:
                libc.memcpy(outside, inside, high - low)
            moved += high - low
    if write:
        libc.memset(base + filled - begin, 0, end - filled)
    return moved


@compiled
def settle(requests: Array, slot: Any, nbytes: int) -> int:
    """Hand over the first `nbytes` of an operation; return the bytes of callers' buffers."""
    if slot.staging < 0:
        return nbytes
    if not slot.write:
        return copy(requests, slot, nbytes)
    begin, stop = slot.offset, slot.offset + nbytes
    total = 0
    for i in range(slot.request, slot.last + 1):
        row = requests[i]
        total += max(0, min(stop, row.offset + row.nbytes) - max(begin, row.offset))
    return total


@compiled
def synchronous(fd: int, write: bool, addr: int, offset: int, nbytes: int) -> int:
    """Move a range by pread or pwrite, all of it; return 0 or an errno."""
    done = 0
    while done < nbytes:
        if write:
            r = libc.pwrite(fd, addr + done, nbytes - done, offset + done)
        else:
            r = libc.pread(fd, addr + done, nbytes - done, offset + done)
        if r < 0:
            code = libc.errno()
            if code != _EINTR:
                return code
        elif r == 0:
            return _EIO if write else _ENODATA
        else:
            done += r
    return 0
