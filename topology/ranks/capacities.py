"""How fast each kind of resource is, where nothing better is known."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tensorspill.errors import UnsupportedError
from tensorspill.topology.solver.forest import MAX_CAPACITY

__all__ = ["Capacities"]


@dataclass(frozen=True, kw_only=True)
class Capacities:
    """Capacities in whole MB/s, which is bytes a microsecond; None leaves that resource out.

    Parameters
    ----------
    stream : int
        What one rank can write at most.
    switch : int or None
        A PCIe switch, or whatever else ranks share below the storage.
    storage : int or None
        What the ranks of one storage group write to: a machine's drives together, one drive, …
    nic : int or None
        A network card, where the storage is a file system over the network.
    filesystem : int or None
        A file system that all machines share.

    Raises
    ------
    UnsupportedError
        If a capacity is not a whole number of at least 1.
    """

    stream: int = 12_000
    switch: int | None = 50_000
    storage: int | None = 26_000
    nic: int | None = 25_000
    filesystem: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name != "stream":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise UnsupportedError(f"The capacity of a {field.name} is {value!r}, no integer")
            if not 1 <= value <= MAX_CAPACITY:
                raise UnsupportedError(
                    f"The capacity of a {field.name} is {value} MB/s",
                    remedy=f"It is 1 to {MAX_CAPACITY}; exclude resources that are dead",
                )
