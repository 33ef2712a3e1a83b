"""Placing memory on a NUMA node, through the kernel's own system call."""

from __future__ import annotations

import ctypes
import os
import platform

from tensorspill.errors import UnsupportedError

__all__ = ["bind_thread", "check_node", "prefer_node"]

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_NODES = "/sys/devices/system/node"


def check_node(node: int) -> None:
    """Raise `UnsupportedError` if this machine is known not to have the NUMA node."""
    if node < 0 or (os.path.isdir(_NODES) and not os.path.isdir(f"{_NODES}/node{node}")):
        raise UnsupportedError(f"This machine has no NUMA node {node}")


def prefer_node(address: int, nbytes: int, node: int) -> str | None:
    """Ask that the pages of a range come from a NUMA node; others follow when it is full.

    Parameters
    ----------
    address, nbytes : int
        The range; `address` is a multiple of the page size, and no page was touched yet.
    node : int
        The node's number.

    Returns
    -------
    str or None
        Why it was not possible, or None if it was.
    """
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"NUMA node {node} not set: unknown architecture {platform.machine()}"
    mask = (ctypes.c_ulong * (node // 64 + 1))()
    mask[node // 64] = 1 << node % 64
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    failed = syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        # The kernel reads one bit less than it is told.
        ctypes.c_ulong(64 * len(mask) + 1),
        ctypes.c_uint(0),
    )
    if failed:
        return f"NUMA node {node} not set: mbind: {os.strerror(ctypes.get_errno())}"
    return None


def bind_thread(node: int) -> str | None:
    """Run the calling thread on the CPUs of a NUMA node from now on.

    Returns
    -------
    str or None
        Why it was not possible, or None if it was.
    """
    try:
        with open(f"{_NODES}/node{node}/cpulist", encoding="ascii") as file:
            cpus = _parse_cpus(file.read())
        os.sched_setaffinity(0, cpus & os.sched_getaffinity(0) or cpus)
    except (OSError, ValueError) as error:
        return f"Thread not bound to NUMA node {node}: {error}"
    return None


def _parse_cpus(text: str) -> set[int]:
    """Return the numbers in a list such as "0-3,8"."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
