"""Compiled completion of operations: done, go on with the rest, another way, or an error."""

from __future__ import annotations

import errno
from typing import Any

from tensorspill.host_fallback.abi import PREAD, PREADV, PWRITE, PWRITEV
from tensorspill.host_fallback.layout import Path
from tensorspill.host_fallback.operation import (
    buffered,
    count,
    settle,
    stopped,
    synchronous,
    tables,
)
from tensorspill.host_fallback.ring_state import ENDED, FREE, FREE_STAGING, PENDING, VECTORS
from tensorspill.jit import compiled

__all__ = ["IOCB_BYTES", "complete", "fail", "fill_iocb", "note_end"]

_EINTR, _EAGAIN = errno.EINTR, errno.EAGAIN
_EINVAL, _EOPNOTSUPP = errno.EINVAL, errno.EOPNOTSUPP
_REFUSED = int(Path.REFUSED)

#: Bytes of a ``struct iovec``.
_IOVEC_BYTES = 16

#: Bytes of an `IOCB`, as a plain integer for compiled code.
IOCB_BYTES = 64


@compiled
def fail(ring: Any, job: int, code: int, file: int, offset: int, nbytes: int) -> None:
    """Record the first error of a job; what has not started is dropped."""
    row = ring.jobs[job]
    if row.error == 0:
        row.error, row.error_file = code, file
        row.error_offset, row.error_nbytes = offset, nbytes


@compiled
def fill_iocb(ring: Any, number: int, fd: int) -> None:
    """Describe a slot to the kernel and list it for submission."""
    slot, iocb = ring.slots[number], ring.iocbs[number]
    iocb.data, iocb.fd = number, fd
    iocb.offset = slot.offset
    if slot.pieces == 1:
        iocb.opcode = PWRITE if slot.write else PREAD
        iocb.addr, iocb.nbytes = slot.addr, slot.nbytes
    else:
        iocb.opcode = PWRITEV if slot.write else PREADV
        iocb.addr = ring.vectors.ctypes.data + number * VECTORS * _IOVEC_BYTES
        iocb.nbytes = slot.pieces
    ring.pending[ring.state[PENDING]] = ring.iocbs.ctypes.data + number * IOCB_BYTES
    ring.state[PENDING] += 1


@compiled
def note_end(ring: Any, job: int) -> None:
    """List a job as ended when nothing of it is left to start or under way."""
    row = ring.jobs[job]
    if row.queued == 0 and row.in_flight == 0 and row.finished == 0:
        row.finished = 1
        ring.ended[ring.state[ENDED]] = job
        ring.state[ENDED] += 1


@compiled
def release_slot(ring: Any, number: int) -> None:
    """Give back a slot and its staging block."""
    slot, state = ring.slots[number], ring.state
    if slot.staging >= 0:
        ring.free_staging[state[FREE_STAGING]] = slot.staging
        state[FREE_STAGING] += 1
    ring.free[state[FREE]] = number
    state[FREE] += 1
    stopped(ring, slot.path)
    ring.jobs[slot.job].in_flight -= 1
    note_end(ring, slot.job)


@compiled
def advance(ring: Any, number: int, done: int, fd: int) -> None:
    """Count the first `done` bytes of an operation that fell short and submit the rest."""
    slot = ring.slots[number]
    requests, _ = tables(ring, slot.job)
    elapsed = ring.clock[2] - slot.begun
    count(ring, slot.job, slot.path, settle(requests, slot, done), done, elapsed)
    slot.offset += done
    slot.nbytes -= done
    slot.want -= done
    _drop_pieces(ring, number, done)
    fill_iocb(ring, number, fd)


@compiled
def _drop_pieces(ring: Any, number: int, done: int) -> None:
    """Take the first `done` bytes off an operation's pieces of memory; some must remain."""
    slot, vectors = ring.slots[number], ring.vectors[number]
    first = 0
    while done >= vectors[first, 1]:
        done -= vectors[first, 1]
        first += 1
    slot.pieces -= first
    for i in range(slot.pieces):
        vectors[i, 0], vectors[i, 1] = vectors[first + i, 0], vectors[first + i, 1]
    vectors[0, 0] += done
    vectors[0, 1] -= done
    slot.addr = vectors[0, 0]


@compiled
def _through_page_cache(ring: Any, number: int) -> int:
    """Move what an operation wants by pread or pwrite; return 0 or an errno."""
    slot, vectors = ring.slots[number], ring.vectors[number]
    fd = buffered(ring, slot.job, slot.file)
    if fd < 0:
        return -fd
    offset, left = slot.offset, slot.want
    for i in range(slot.pieces):
        length = min(left, vectors[i, 1])
        code = synchronous(fd, slot.write != 0, vectors[i, 0], offset, length)
        if code:
            return code
        offset += length
        left -= length
    return 0


@compiled
def complete(ring: Any, number: int, res: int) -> None:
    """Deal with the result of one operation: done, go on, other way, or error."""
    slot = ring.slots[number]
    requests, files = tables(ring, slot.job)
    file = files[slot.file]
    if res == -_EINTR or res == -_EAGAIN:
        fill_iocb(ring, number, file.direct)
        return
    path = slot.path
    begin, want = slot.offset, slot.want
    if 0 <= res < want:
        whole = res - res % file.granule
        if whole > 0:
            advance(ring, number, whole, file.direct)
            return
    if res < want:
        # A refused operation, or one that ended in mid-block: the page cache takes any range, and
        # says what is wrong if that fails as well.
        refused = res == -_EINVAL or res == -_EOPNOTSUPP
        code = -res
        if refused or res >= 0:
            path = _REFUSED
            code = _through_page_cache(ring, number)
        if code:
            # Name the callers' bytes and not the blocks around them.
            stop = begin + want
            if slot.staging >= 0:
                begin = max(begin, requests[slot.request].offset)
            fail(ring, slot.job, code, slot.file, begin, stop - begin)
            release_slot(ring, number)
            return
    elapsed = ring.clock[2] - slot.begun
    count(ring, slot.job, path, settle(requests, slot, want), slot.nbytes, elapsed)
    release_slot(ring, number)
