"""Keeping threads and their memory near a rank's devices.

Linux hands a thread's CPUs and memory policy on to the threads that it starts. Engines and pools
also take a NUMA node for the threads that they start later and for their memory::

    with bound(affinity):
        engine = open_engine(folder, numa_node=affinity.numa_node)
        pool = BufferPool("1GiB", numa_node=affinity.numa_node)
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import platform
from collections.abc import Iterator
from dataclasses import dataclass

from tensorspill.topology.affinity import Affinity

__all__ = ["Binding", "bind_process", "bind_thread", "bound"]

log = logging.getLogger(__name__)

#: System calls set_mempolicy and get_mempolicy, by architecture.
_CALLS = {"x86_64": (238, 239), "aarch64": (237, 236)}
_DEFAULT, _PREFERRED = 0, 1
_WORDS = 16
_BITS = 64


@dataclass(frozen=True)
class Binding:
    """What was bound: threads, the CPUs they have now, the NUMA node; and what was not possible."""

    threads: tuple[int, ...]
    cpus: tuple[int, ...]
    numa_node: int | None
    notes: tuple[str, ...] = ()


def bind_thread(affinity: Affinity, *, memory: bool = True) -> Binding:
    """Keep the calling thread on a rank's CPUs, and let it take memory from there first.

    Parameters
    ----------
    affinity : Affinity
        Of the rank. CPUs that this process may not use are left out; if none is left, or none is
        known, the thread stays where it is.
    memory : bool
        Prefer the rank's NUMA node for memory that the thread touches first. Other nodes follow
        when it is full.
    """
    notes: list[str] = []
    cpus = _bind(0, affinity, notes)
    node = affinity.numa_node if memory else None
    if node is not None and (why := _prefer(node)):
        notes.append(why)
        node = None
    return Binding((_own(),), cpus, node, tuple(notes))


def bind_process(affinity: Affinity, *, memory: bool = True) -> Binding:
    """Keep all threads of this process on a rank's CPUs, those that they start from now on as well.

    The memory policy is the calling thread's alone, and that of threads that it starts: the kernel
    lets no thread set another's.
    """
    notes: list[str] = []
    threads = sorted(int(name) for name in os.listdir("/proc/self/task"))
    cpus = [_bind(thread, affinity, notes) for thread in threads]
    own = bind_thread(affinity, memory=memory)
    known = tuple(dict.fromkeys((*notes, *own.notes)))
    return Binding(tuple(threads), cpus[0] if cpus else own.cpus, own.numa_node, known)


@contextlib.contextmanager
def bound(affinity: Affinity, *, memory: bool = True) -> Iterator[Binding]:
    """Bind the calling thread while the block runs; threads that it starts meanwhile stay bound."""
    before, policy = os.sched_getaffinity(0), _policy()
    binding = bind_thread(affinity, memory=memory)
    for note in binding.notes:
        log.warning("%s", note)
    try:
        yield binding
    finally:
        os.sched_setaffinity(0, before)
        if binding.numa_node is not None and policy is not None:
            _set_policy(*policy)


def _bind(thread: int, affinity: Affinity, notes: list[str]) -> tuple[int, ...]:
    """Bind a thread, and return the CPUs that it has then."""
    try:
        allowed = os.sched_getaffinity(thread)
        wanted = allowed & set(affinity.cpus)
        if not wanted:
            why = "none is known" if not affinity.cpus else "this process may use none of them"
            notes.append(f"Rank {affinity.rank} not bound to its CPUs: {why}")
            return tuple(sorted(allowed))
        os.sched_setaffinity(thread, wanted)
        return tuple(sorted(wanted))
    except ProcessLookupError:
        # The thread ended meanwhile.
        return ()
    except OSError as error:
        notes.append(f"Rank {affinity.rank} not bound to its CPUs: {error}")
        return ()


def _own() -> int:
    return int(os.readlink("/proc/thread-self").rsplit("/", 1)[-1])


def _prefer(node: int) -> str | None:
    """Prefer a node's memory, or return why not."""
    if not 0 <= node < _WORDS * _BITS:
        return f"NUMA node {node} not preferred: there is no such node"
    mask = [0] * _WORDS
    mask[node // _BITS] = 1 << node % _BITS
    return _set_policy(_PREFERRED, mask)


def _set_policy(mode: int, mask: list[int]) -> str | None:
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return f"Memory not bound: unknown architecture {platform.machine()}"
    words = (ctypes.c_ulong * _WORDS)(*mask)
    used = ctypes.c_ulong(_WORDS * _BITS + 1 if any(mask) else 0)
    if _system_call(numbers[0], ctypes.c_int(mode), words if any(mask) else None, used):
        return f"Memory not bound: set_mempolicy: {os.strerror(ctypes.get_errno())}"
    return None


def _policy() -> tuple[int, list[int]] | None:
    """Return the calling thread's memory policy, or None if it can't be told."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        return None
    mode, words = ctypes.c_int(_DEFAULT), (ctypes.c_ulong * _WORDS)()
    size = ctypes.c_ulong(_WORDS * _BITS)
    if _system_call(numbers[1], ctypes.byref(mode), words, size, None, ctypes.c_ulong(0)):
        return None
    return mode.value, list(words)


def _system_call(number: int, *arguments: object) -> int:
    """Return 0, or -1 with errno set."""
    call = ctypes.CDLL(None, use_errno=True).syscall
    call.restype = ctypes.c_long
    return int(call(ctypes.c_long(number), *arguments))
