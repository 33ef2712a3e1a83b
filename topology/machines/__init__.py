"""Known machines by name, and clusters of them of any size.

They hold what is publicly documented. What is made up, such as the place of NVMe drives where no
source gives it, is marked: `Drive.synthetic` and `Machine.notes`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Mapping

from tensorspill.errors import UnsupportedError
from tensorspill.topology.machine import Machine
from tensorspill.topology.machines import clouds, nvidia, odd

__all__ = ["cluster", "machine", "names"]

_KNOWN: dict[str, Callable[[], Machine]] = {
    "dgx-2": nvidia.dgx_2,
    "dgx-a100": nvidia.dgx_a100,
    "dgx-h100": nvidia.dgx_h100,
    "azure-nd-a100-v4": clouds.azure_nd_a100_v4,
    "azure-nd-h100-v5": clouds.azure_nd_h100_v5,
    "aws-p4d": clouds.aws_p4d,
    "aws-p5": clouds.aws_p5,
    "hgx-h100-vm": nvidia.hgx_h100_vm,
    "gb200": nvidia.gb200,
    "gh200x4": nvidia.gh200x4,
    "gcp-a3": clouds.gcp_a3,
    "adversarial": odd.adversarial,
    "plain": odd.plain,
}


def names() -> tuple[str, ...]:
    """Return the names of the known machines."""
    return tuple(_KNOWN)


@functools.cache
def machine(name: str) -> Machine:
    """Return a known machine.

    Raises
    ------
    UnsupportedError
        None has this name.
    """
    if name not in _KNOWN:
        raise UnsupportedError(f"No machine is known as {name!r}; known are {', '.join(_KNOWN)}")
    return _KNOWN[name]()


def cluster(
    kinds: str | Machine | Mapping[str, int] | Iterable[str | Machine], nodes: int | None = None
) -> tuple[Machine, ...]:
    """Return the machines of a cluster, each with a hostname of its own.

    All machines of a kind share their parts, so that a cluster of any size is small and made fast.

    Parameters
    ----------
    kinds : str, Machine, mapping or iterable
        A known name or a machine, of which there are `nodes`; a number of machines for each known
        name; or one name or machine for each node, in order.
    nodes : int, optional
        How many, where `kinds` is one name or machine; 1 by default.

    Raises
    ------
    UnsupportedError
        A name isn't known, a number is negative, or `nodes` is given with several kinds.
    """
    listed: list[str | Machine]
    if isinstance(kinds, (str, Machine)):
        listed = [kinds] * _count(1 if nodes is None else nodes)
    elif nodes is not None:
        raise UnsupportedError(
            "The number of nodes goes with one kind of machine, not with several"
        )
    elif isinstance(kinds, Mapping):
        listed = [name for name, count in kinds.items() for _ in range(_count(count))]
    else:
        listed = list(kinds)
    found = [machine(kind) if isinstance(kind, str) else kind for kind in listed]
    return tuple(_renamed(kind, f"{kind.hostname}-{i}") for i, kind in enumerate(found))


def _count(count: int) -> int:
    if count < 0:
        raise UnsupportedError(f"A cluster can't have {count} nodes")
    return count


def _renamed(original: Machine, hostname: str) -> Machine:
    """Return a machine of another name that shares all parts; what was checked stays so."""
    renamed = copy.copy(original)
    object.__setattr__(renamed, "hostname", hostname)
    return renamed
