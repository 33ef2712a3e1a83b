"""The state of a ring: numpy arrays that Python and the compiled loop share.

No numba here, so that the state can be made and looked at without it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tensorspill.engine.latencies import BUCKETS
from tensorspill.host_fallback.abi import EVENT, IOCB
from tensorspill.host_fallback.layout import JOB, SLOT, Path

__all__ = [
    "COUNT",
    "ENDED",
    "FREE",
    "FREE_STAGING",
    "HEAD",
    "IN_FLIGHT",
    "JOBS",
    "NAME",
    "PENDING",
    "VECTORS",
    "Ring",
    "new_ring",
]

#: Indices into `Ring.state`: sizes of the stacks and lists, and the queue of jobs.
FREE, FREE_STAGING, IN_FLIGHT, PENDING, HEAD, COUNT, ENDED, STATE_FIELDS = range(8)

#: Jobs that a ring works on at a time; more wait with the owner.
JOBS = 64

#: Pieces of memory that one operation may have; a piece is at least as large as what is packed.
VECTORS = 64

#: How long to wait for a completion while the queue has room, in nanoseconds.
PATIENCE = 2_000_000

#: Where a process finds the files that it has open.
NAME = b"/proc/self/fd/"
#: Room for a number and the zero behind it.
_DIGITS = 18

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
    vectors : ndarray of int64
        ``[slot, piece, (address, bytes)]``: an ``iovec`` for each piece of memory of an operation.
    pending : ndarray of int64
        Addresses of iocbs to submit, the first ``state[PENDING]``.
    free, free_staging, order, ended : ndarray of int64
        Stacks of free slots and staging blocks, the queue of job numbers, jobs that ended.
    jobs : ndarray of `JOB`
    moved : ndarray of int64
        ``[job, path, (bytes, io bytes, operations, nanoseconds of the slowest)]``.
    latency : ndarray of int64
        ``[path, bucket]``: operations by how long they took, see `engine.latencies`.
    busy : ndarray of int64
        ``[path, (operations under way, since when, nanoseconds with any under way)]``.
    state : ndarray of int64
        See the indices above.
    inbox : ndarray of int64
        One element; not 0 when new jobs wait for the owner.
    timeout, clock : ndarray of int64
        A ``timespec`` for waiting while the queue is not full; scratch space for reading the clock,
        and, third, when completions were last taken.
    name : ndarray of uint8
        ``/proc/self/fd/`` and room for a number, by which an open file is opened again.
    """

    context: int
    block: int
    staging: int
    iocbs: Array
    events: Array
    slots: Array
    vectors: Array
    pending: Array
    free: Array
    free_staging: Array
    order: Array
    ended: Array
    jobs: Array
    moved: Array
    latency: Array
    busy: Array
    state: Array
    inbox: Array
    timeout: Array
    clock: Array
    name: Array


def new_ring(context: int, block_bytes: int, depth: int) -> Ring:
    """Return the state of an idle ring for `depth` operations."""
    state = np.zeros(STATE_FIELDS, "i8")
    state[FREE] = depth
    return Ring(
        context=context,
        block=block_bytes,
        staging=0,
        iocbs=np.zeros(depth, IOCB),
        events=np.zeros(depth, EVENT),
        slots=np.zeros(depth, SLOT),
        vectors=np.zeros((depth, VECTORS, 2), "i8"),
        pending=np.zeros(depth, "i8"),
        free=np.arange(depth, dtype="i8"),
        free_staging=np.zeros(depth, "i8"),
        order=np.zeros(JOBS, "i8"),
        ended=np.zeros(JOBS, "i8"),
        jobs=np.zeros(JOBS, JOB),
        moved=np.zeros((JOBS, len(Path), 4), "i8"),
        latency=np.zeros((len(Path), BUCKETS), "i8"),
        busy=np.zeros((len(Path), 3), "i8"),
        state=state,
        inbox=np.zeros(1, "i8"),
        timeout=np.array([0, PATIENCE], "i8"),
        clock=np.zeros(3, "i8"),
        name=np.frombuffer(bytearray(NAME + bytes(_DIGITS)), "u1"),
    )
