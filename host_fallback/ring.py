"""The compiled loop that keeps one AIO context full.

One thread owns a ring and calls `pump`, which returns only when a job ended, when nothing is left
to do, or when new jobs wait. Everything else (cutting into blocks, gathering, scattering, short
completions, errors) happens inside, without the GIL.

A job is a batch or a part of one; jobs are served in order, and the blocks of the next one follow
those of the last without a gap.
"""

from __future__ import annotations

import errno
from typing import Any

import numpy as np
from numba import carray

from tensorspill.host_fallback import libc
from tensorspill.host_fallback.abi import system_calls
from tensorspill.host_fallback.completion import IOCB_BYTES, complete, fail, fill_iocb, note_end
from tensorspill.host_fallback.layout import SEGMENT, Mode
from tensorspill.host_fallback.operation import (
    buffered,
    copy,
    count,
    started,
    stopped,
    synchronous,
    tables,
)
from tensorspill.host_fallback.ring_state import (
    COUNT,
    ENDED,
    FREE,
    FREE_STAGING,
    HEAD,
    IN_FLIGHT,
    PENDING,
    VECTORS,
)
from tensorspill.jit import compiled

__all__ = ["FATAL", "IDLE", "JOB_ENDED", "WAKE", "pump"]

IDLE, JOB_ENDED, WAKE, FATAL = 0, 1, 2, 3

_GETEVENTS, _SUBMIT = system_calls().io_getevents, system_calls().io_submit
_EINTR, _EAGAIN = errno.EINTR, errno.EAGAIN
_DIRECT, _BUFFERED = int(Mode.DIRECT), int(Mode.BUFFERED)
_POINTER_BYTES = 8


@compiled
def _skip_requests(ring: Any, job: int, segment: Any, offset: int) -> None:
    """Move the job's request cursor to the first request that reaches beyond `offset`."""
    row = ring.jobs[job]
    requests, _ = tables(ring, job)
    row.request = max(row.request, segment.first)
    while row.request < segment.last:
        request = requests[row.request]
        if request.offset + request.nbytes > offset:
            break
        row.request += 1


@compiled
def _step(row: Any, segment: Any, length: int) -> None:
    """Move a job's cursor behind `length` bytes of its segment."""
    row.position += length
    if row.position >= segment.nbytes:
        row.segment += 1
        row.position = 0


@compiled
def _queue_block(ring: Any, job: int, segment: Any, length: int) -> None:
    """Put the next block of a direct or staged segment into a slot, ready to be submitted."""
    row = ring.jobs[job]
    state = ring.state
    state[FREE] -= 1
    number = ring.free[state[FREE]]
    slot = ring.slots[number]
    requests, files = tables(ring, job)
    slot.job, slot.path, slot.file, slot.write = job, segment.path, segment.file, segment.write
    slot.offset, slot.nbytes = segment.offset + row.position, length
    slot.useful = segment.useful
    slot.want = min(length, segment.useful - slot.offset)
    slot.staging = -1
    slot.addr = segment.addr + row.position
    if segment.mode != _DIRECT:
        state[FREE_STAGING] -= 1
        slot.staging = ring.free_staging[state[FREE_STAGING]]
        slot.addr = ring.staging + slot.staging * ring.block
        _skip_requests(ring, job, segment, slot.offset)
        slot.request, slot.last = row.request, segment.last
        if segment.write:
            copy(requests, slot, length)
    slot.pieces = 1
    ring.vectors[number, 0, 0], ring.vectors[number, 0, 1] = slot.addr, length
    _step(row, segment, length)
    if segment.mode == _DIRECT:
        _join_pieces(ring, job, number)
    started(ring, segment.path)
    slot.begun = libc.nanoseconds(ring.clock)
    fill_iocb(ring, number, files[segment.file].direct)
    row.in_flight += 1


@compiled
def _join_pieces(ring: Any, job: int, number: int) -> None:
    """Let a direct block go on with the segments behind it in the file, up to the block's size.

    One operation of several tensors costs a drive less than one for each, and needs no copy.
    """
    row, slot = ring.jobs[job], ring.slots[number]
    segments = carray(libc.at(row.segments), row.n_segments, SEGMENT)
    while slot.nbytes < ring.block and slot.pieces < VECTORS and row.segment < row.n_segments:
        segment = segments[row.segment]
        follows = segment.offset == slot.offset + slot.nbytes
        if segment.mode != _DIRECT or segment.file != slot.file or not follows:
            break
        if segment.write != slot.write:
            break
        length = min(ring.block - slot.nbytes, segment.nbytes)
        ring.vectors[number, slot.pieces, 0] = segment.addr
        ring.vectors[number, slot.pieces, 1] = length
        slot.pieces += 1
        slot.nbytes += length
        slot.want += length
        slot.useful = segment.useful
        _step(row, segment, length)


@compiled
def _buffered_block(ring: Any, job: int, segment: Any, length: int) -> None:
    """Move the next block of a buffered segment now."""
    row = ring.jobs[job]
    offset = segment.offset + row.position
    started(ring, segment.path)
    begun = libc.nanoseconds(ring.clock)
    fd = buffered(ring, job, segment.file)
    if fd < 0:
        code = -fd
    else:
        code = synchronous(fd, segment.write != 0, segment.addr + row.position, offset, length)
    stopped(ring, segment.path)
    if code:
        fail(ring, job, code, segment.file, offset, length)
    else:
        elapsed = libc.nanoseconds(ring.clock) - begun
        count(ring, job, segment.path, length, length, elapsed)


@compiled
def _stop_early(ring: Any, job: int) -> bool:
    """Whether the rest of a job is dropped: it failed, or somebody cancelled it."""
    row = ring.jobs[job]
    if row.error == 0 and row.segment < row.n_segments:
        cancel = carray(libc.at(row.cancel), 1, np.int64)
        if cancel[0] != 0:
            row.dropped = 1
    return bool(row.error != 0 or row.dropped != 0)


@compiled
def _fill(ring: Any) -> bool:
    """Start blocks until no slot, no staging block or no work is left.

    Return False if there is more to start at once: what takes this thread's time, a buffered block
    or one that was copied, first lets the drive have what is ready.
    """
    state = ring.state
    while state[COUNT] > 0:
        job = ring.order[state[HEAD]]
        row = ring.jobs[job]
        if _stop_early(ring, job) or row.segment >= row.n_segments:
            state[HEAD] = (state[HEAD] + 1) % len(ring.order)
            state[COUNT] -= 1
            row.queued = 0
            note_end(ring, job)
            continue
        segment = carray(libc.at(row.segments), row.n_segments, SEGMENT)[row.segment]
        length = min(ring.block, segment.nbytes - row.position)
        waits = segment.mode == _BUFFERED
        if waits:
            _buffered_block(ring, job, segment, length)
            _step(row, segment, length)
        elif state[FREE] == 0 or (segment.mode != _DIRECT and state[FREE_STAGING] == 0):
            return True
        else:
            _queue_block(ring, job, segment, length)
            if segment.mode != _DIRECT and segment.write != 0:
                return False
        if waits and state[IN_FLIGHT] + state[PENDING] + state[ENDED] > 0:
            return False
    return True


@compiled
def _submit(ring: Any) -> None:
    """Hand all pending operations to the kernel; a refused one completes with its error."""
    state = ring.state
    first = 0
    while first < state[PENDING]:
        address = ring.pending.ctypes.data + first * _POINTER_BYTES
        count = state[PENDING] - first
        r = libc.syscall(_SUBMIT, ring.context, count, address, 0, 0)
        if r > 0:
            state[IN_FLIGHT] += r
            first += r
            continue
        code = libc.errno()
        if code == _EINTR:
            continue
        if code == _EAGAIN:
            break
        number = (ring.pending[first] - ring.iocbs.ctypes.data) // IOCB_BYTES
        first += 1
        complete(ring, number, -code)
    remaining = state[PENDING] - first
    for i in range(remaining):
        ring.pending[i] = ring.pending[first + i]
    state[PENDING] = remaining


@compiled
def _reap(ring: Any, least: int) -> int:
    """Wait for `least` completions and deal with all there are; return 0 or an errno.

    Waiting is bounded while the queue has room, so that new jobs do not wait for old blocks.
    """
    state = ring.state
    timeout = ring.timeout.ctypes.data if state[FREE] > 0 else 0
    r = libc.syscall(
        _GETEVENTS, ring.context, least, len(ring.events), ring.events.ctypes.data, timeout
    )
    if r < 0:
        code = libc.errno()
        return 0 if code == _EINTR else code
    state[IN_FLIGHT] -= r
    ring.clock[2] = libc.nanoseconds(ring.clock)
    for i in range(r):
        event = ring.events[i]
        copied = ring.slots[event.data].staging >= 0
        complete(ring, event.data, event.res)
        if copied and i + 1 < r:
            # Copying took a while, in which the drive may have run out of work.
            _fill(ring)
            _submit(ring)
    return 0


@compiled
def pump(ring: Any) -> int:
    """Run the ring until there is something to say; return what.

    Returns
    -------
    int
        `JOB_ENDED`: the first ``state[ENDED]`` of `ended`. `IDLE`: nothing to do. `WAKE`: new jobs
        wait in the inbox. `FATAL`: the context is unusable.
    """
    state = ring.state
    while True:
        blocked = _fill(ring)
        _submit(ring)
        if state[ENDED] > 0:
            return JOB_ENDED
        if state[IN_FLIGHT] == 0 and state[PENDING] == 0:
            if state[COUNT] == 0:
                return IDLE
            continue
        if ring.inbox[0] != 0 and state[COUNT] == 0:
            return WAKE
        if state[IN_FLIGHT] > 0 and _reap(ring, 1 if blocked else 0) != 0:
            return FATAL
