"""The compiled loop that keeps one AIO context full.

One thread owns a ring and calls `pump`, which returns only when a job ended, when nothing is left
to do, or when new jobs wait. Everything else (cutting into blocks, gathering, scattering, short
completions, errors) happens inside, without the GIL.

State is kept in numpy arrays that the owner allocates once (`tensorspill.host_fallback.context`).
A job is a batch or a part of one; jobs are served in order, and the blocks of the next one follow
those of the last without a gap.
"""

from __future__ import annotations

import errno as _errno
from typing import Any, NamedTuple

import numpy as np
from numba import carray

from tensorspill.engine.batch import REQUEST
from tensorspill.host_fallback import libc
from tensorspill.host_fallback.abi import PREAD, PWRITE, system_calls
from tensorspill.host_fallback.layout import FILE, SEGMENT, Mode, Path
from tensorspill.pool.jit import compiled

__all__ = ["FATAL", "IDLE", "JOB_ENDED", "WAKE", "Ring", "pump"]

IDLE, JOB_ENDED, WAKE, FATAL = 0, 1, 2, 3

#: Indices into `Ring.state`.
FREE, FREE_STAGING, IN_FLIGHT, PENDING, HEAD, COUNT, ENDED, STATE_FIELDS = range(8)

_GETEVENTS, _SUBMIT = system_calls().io_getevents, system_calls().io_submit
_EINTR, _EAGAIN, _EINVAL = _errno.EINTR, _errno.EAGAIN, _errno.EINVAL
_ENODATA, _EIO, _EOPNOTSUPP = _errno.ENODATA, _errno.EIO, _errno.EOPNOTSUPP
_DIRECT, _BUFFERED = int(Mode.DIRECT), int(Mode.BUFFERED)
_REFUSED = int(Path.REFUSED)
_IOCB_BYTES, _POINTER_BYTES = 64, 8

Array = np.ndarray[Any, Any]


class Ring(NamedTuple):
    """Everything a ring needs, as arrays of fixed size.

    Attributes
    ----------
    context : int
        From ``io_setup``; 0 if there is none, then every segment must be buffered.
    block : int
        Bytes of one operation.
    staging : int
        Address of the staging blocks, each of `block` bytes.
    iocbs, events, slots : ndarray
        One `IOCB`, `EVENT` and `SLOT` for each operation that may be under way.
    pending : ndarray of int64
        Addresses of iocbs to submit, the first ``state[PENDING]``.
    free, free_staging, order, ended : ndarray of int64
        Stacks of free slots and staging blocks, the queue of job numbers, jobs that ended.
    jobs : ndarray of `JOB`
    moved : ndarray of int64
        ``[job, path, (bytes, io bytes, operations)]``.
    busy : ndarray of int64
        ``[path, (operations under way, since when, nanoseconds with any under way)]``.
    state : ndarray of int64
        See the indices above.
    inbox : ndarray of int64
        One element; not 0 when new jobs wait for the owner.
    timeout, clock : ndarray of int64
        A ``timespec`` for waiting while the queue is not full, and scratch space.
    """

    context: int
    block: int
    staging: int
    iocbs: Array
    events: Array
    slots: Array
    pending: Array
    free: Array
    free_staging: Array
    order: Array
    ended: Array
    jobs: Array
    moved: Array
    busy: Array
    state: Array
    inbox: Array
    timeout: Array
    clock: Array


@compiled
def _started(ring: Any, path: int) -> None:
    """Account that an operation of `path` began."""
    if ring.busy[path, 0] == 0:
        ring.busy[path, 1] = libc.nanoseconds(ring.clock)
    ring.busy[path, 0] += 1


@compiled
def _stopped(ring: Any, path: int) -> None:
    """Account that an operation of `path` ended."""
    ring.busy[path, 0] -= 1
    if ring.busy[path, 0] == 0:
        ring.busy[path, 2] += libc.nanoseconds(ring.clock) - ring.busy[path, 1]


@compiled
def _count(ring: Any, job: int, path: int, nbytes: int, io_bytes: int) -> None:
    """Account bytes that were moved."""
    ring.moved[job, path, 0] += nbytes
    ring.moved[job, path, 1] += io_bytes
    ring.moved[job, path, 2] += 1


@compiled
def _fail(ring: Any, job: int, code: int, file: int, offset: int, nbytes: int) -> None:
    """Record the first error of a job; what has not started is dropped."""
    row = ring.jobs[job]
    if row.error == 0:
        row.error, row.error_file = code, file
        row.error_offset, row.error_nbytes = offset, nbytes


@compiled
def _copy(requests: Array, slot: Any, nbytes: int) -> int:
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
def _synchronous(fd: int, write: bool, addr: int, offset: int, nbytes: int) -> int:
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


@compiled
def _tables(ring: Any, job: int) -> tuple[Array, Array]:
    """Return the requests and files of a job. Lengths are bounded by the segments' indices."""
    row = ring.jobs[job]
    requests = carray(libc.at(row.requests), 1 << 40, REQUEST)
    files = carray(libc.at(row.files), 1 << 20, FILE)
    return requests, files


@compiled
def _buffered_block(ring: Any, job: int, segment: Any, length: int) -> None:
    """Move the next block of a buffered segment now."""
    row = ring.jobs[job]
    _, files = _tables(ring, job)
    offset = segment.offset + row.position
    _started(ring, segment.path)
    fd = files[segment.file].buffered
    code = _synchronous(fd, segment.write != 0, segment.addr + row.position, offset, length)
    _stopped(ring, segment.path)
    if code:
        _fail(ring, job, code, segment.file, offset, length)
    else:
        _count(ring, job, segment.path, length, length)


@compiled
def _queue_block(ring: Any, job: int, segment: Any, length: int) -> None:
    """Put the next block of a direct or staged segment into a slot, ready to be submitted."""
    row = ring.jobs[job]
    state = ring.state
    state[FREE] -= 1
    number = ring.free[state[FREE]]
    slot = ring.slots[number]
    requests, files = _tables(ring, job)
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
            _copy(requests, slot, length)
    _started(ring, segment.path)
    _fill_iocb(ring, number, files[segment.file].direct)
    row.in_flight += 1


@compiled
def _skip_requests(ring: Any, job: int, segment: Any, offset: int) -> None:
    """Move the job's request cursor to the first request that reaches beyond `offset`."""
    row = ring.jobs[job]
    requests, _ = _tables(ring, job)
    row.request = max(row.request, segment.first)
    while row.request < segment.last:
        request = requests[row.request]
        if request.offset + request.nbytes > offset:
            break
        row.request += 1


@compiled
def _fill_iocb(ring: Any, number: int, fd: int) -> None:
    """Describe a slot to the kernel and list it for submission."""
    slot, iocb = ring.slots[number], ring.iocbs[number]
    iocb.data, iocb.fd = number, fd
    iocb.opcode = PWRITE if slot.write else PREAD
    iocb.addr, iocb.nbytes, iocb.offset = slot.addr, slot.nbytes, slot.offset
    ring.pending[ring.state[PENDING]] = ring.iocbs.ctypes.data + number * _IOCB_BYTES
    ring.state[PENDING] += 1


@compiled
def _release_slot(ring: Any, number: int) -> None:
    """Give back a slot and its staging block."""
    slot, state = ring.slots[number], ring.state
    if slot.staging >= 0:
        ring.free_staging[state[FREE_STAGING]] = slot.staging
        state[FREE_STAGING] += 1
    ring.free[state[FREE]] = number
    state[FREE] += 1
    _stopped(ring, slot.path)
    ring.jobs[slot.job].in_flight -= 1
    _note_end(ring, slot.job)


@compiled
def _note_end(ring: Any, job: int) -> None:
    """List a job as ended when nothing of it is left to start or under way."""
    row = ring.jobs[job]
    stopped = row.segment >= row.n_segments or row.error != 0 or row.dropped != 0
    if stopped and row.in_flight == 0 and row.finished == 0:
        row.finished = 1
        ring.ended[ring.state[ENDED]] = job
        ring.state[ENDED] += 1


@compiled
def _complete(ring: Any, number: int, res: int) -> None:
    """Deal with the result of one operation: done, go on, other way, or error."""
    slot = ring.slots[number]
    requests, files = _tables(ring, slot.job)
    file = files[slot.file]
    if res == -_EINTR or res == -_EAGAIN:
        _fill_iocb(ring, number, file.direct)
        return
    path = slot.path
    begin, want = slot.offset, slot.want
    if 0 <= res < want:
        whole = res - res % file.granule
        if whole > 0:
            _advance(ring, number, whole, file.direct)
            return
    if res < want:
        # A refused operation, or one that ended in mid-block: the page cache takes any range, and
        # says what is wrong if that fails as well.
        refused = res == -_EINVAL or res == -_EOPNOTSUPP
        code = -res
        if refused or res >= 0:
            path = _REFUSED
            code = _synchronous(file.buffered, slot.write != 0, slot.addr, begin, want)
        if code:
            # Name the callers' bytes and not the blocks around them.
            stop = begin + want
            if slot.staging >= 0:
                begin = max(begin, requests[slot.request].offset)
            _fail(ring, slot.job, code, slot.file, begin, stop - begin)
            _release_slot(ring, number)
            return
    _count(ring, slot.job, path, _settle(requests, slot, want), slot.nbytes)
    _release_slot(ring, number)


@compiled
def _settle(requests: Array, slot: Any, nbytes: int) -> int:
    """Hand over the first `nbytes` of an operation; return the bytes of callers' buffers."""
    if slot.staging < 0:
        return nbytes
    if not slot.write:
        return _copy(requests, slot, nbytes)
    begin, stop = slot.offset, slot.offset + nbytes
    total = 0
    for i in range(slot.request, slot.last + 1):
        row = requests[i]
        total += max(0, min(stop, row.offset + row.nbytes) - max(begin, row.offset))
    return total


@compiled
def _advance(ring: Any, number: int, done: int, fd: int) -> None:
    """Count the first `done` bytes of an operation that fell short and submit the rest."""
    slot = ring.slots[number]
    requests, _ = _tables(ring, slot.job)
    _count(ring, slot.job, slot.path, _settle(requests, slot, done), done)
    slot.addr += done
    slot.offset += done
    slot.nbytes -= done
    slot.want -= done
    _fill_iocb(ring, number, fd)


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

    Return False if there is more to start at once: buffered blocks give way to completions.
    """
    state = ring.state
    while state[COUNT] > 0:
        job = ring.order[state[HEAD]]
        row = ring.jobs[job]
        if _stop_early(ring, job) or row.segment >= row.n_segments:
            state[HEAD] = (state[HEAD] + 1) % len(ring.order)
            state[COUNT] -= 1
            _note_end(ring, job)
            continue
        segment = carray(libc.at(row.segments), row.n_segments, SEGMENT)[row.segment]
        length = min(ring.block, segment.nbytes - row.position)
        buffered = segment.mode == _BUFFERED
        if buffered:
            _buffered_block(ring, job, segment, length)
        elif state[FREE] == 0 or (segment.mode != _DIRECT and state[FREE_STAGING] == 0):
            return True
        else:
            _queue_block(ring, job, segment, length)
        row.position += length
        if row.position >= segment.nbytes:
            row.segment += 1
            row.position = 0
        if buffered and state[IN_FLIGHT] + state[PENDING] + state[ENDED] > 0:
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
        number = (ring.pending[first] - ring.iocbs.ctypes.data) // _IOCB_BYTES
        first += 1
        _complete(ring, number, -code)
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
    for i in range(r):
        event = ring.events[i]
        _complete(ring, event.data, event.res)
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
