"""Where ranks are: the machine, socket, switch, NIC, drive and GPU of each, and what they share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.nesting import Level, nest
from tensorspill.topology.sequences import Named
from tensorspill.topology.solver.arrays import Integers
from tensorspill.topology.solver.forest import Forest

__all__ = ["Placement", "Unit", "level", "streams"]


class Unit(Enum):
    """Of what there is to be one writer for each slice."""

    NONE = "none"  #: one writer for each slice
    REPLICA = "replica"  #: every replica may write
    SOCKET = "socket"
    MACHINE = "machine"
    NIC = "nic"
    NVME = "nvme"
    GPU_SWITCH = "gpu-switch"

    @classmethod
    def _missing_(cls, value: object) -> Unit:
        raise UnsupportedError(f"{value!r} is none of {', '.join(unit.value for unit in cls)}")


@dataclass(frozen=True, eq=False)
class Placement:
    """Which devices each rank uses.

    Parameters
    ----------
    where : mapping of Unit to array of int64
        For each unit but NONE and REPLICA the number of each rank's device; -1 is unknown.
    names : mapping of Unit to sequence of str
        What the devices are called.
    forest : Forest
        What ranks share on their way to storage, with capacities.
    notes : tuple of str
        What could not be taken into account, and why.
    kinds : tuple of (str, int)
        The kinds of resources in the forest, in their order, each with the number of the first
        resource after it.
    """

    where: Mapping[Unit, Integers]
    names: Mapping[Unit, Sequence[str]]
    forest: Forest
    notes: tuple[str, ...] = field(default=())
    kinds: tuple[tuple[str, int], ...] = field(default=())

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return len(self.forest.leaf)

    @property
    def machines(self) -> int:
        """Number of machines."""
        return len(self.names[Unit.MACHINE])

    def device(self, unit: Unit, rank: int) -> str | None:
        """Return the name of a rank's device, or None if it is unknown."""
        number = int(self.where[unit][rank]) if unit in self.where else -1
        return None if number < 0 else self.names[unit][number]

    def without(self, excluded: Iterable[str]) -> Placement:
        """Return the same placement in which these resources carry nothing.

        A name may be that of one resource, or of a machine for all resources of it.
        """
        numbers = []
        for item in excluded:
            inside = [k for k, n in enumerate(self.forest.names) if n == item]
            inside += [k for k, n in enumerate(self.forest.names) if n.startswith(f"{item}/")]
            if not inside:
                raise UnsupportedError(
                    f"There is no resource {item!r} to exclude",
                    remedy=f"Names are like {self.forest.names[0]}, {self.forest.names[-1]}",
                )
            numbers += inside
        return replace(self, forest=self.forest.without(numbers)) if numbers else self

    @classmethod
    def regular(
        cls,
        machines: int,
        per_machine: int | Sequence[int] = 8,
        *,
        order: str | npt.ArrayLike = "block",
        sockets: int = 2,
        switches: int = 4,
        storage: str = "machine",
        capacities: Capacities | None = None,
        storage_mbps: npt.ArrayLike | None = None,
    ) -> Placement:
        """Return machines of one kind, without asking any of them.

        Parameters
        ----------
        machines : int
            Number of machines.
        per_machine : int or sequence of int
            Ranks on each.
        order : str or array of int
            ``"block"``: the first ranks are on the first machine, and so on; ``"cyclic"``: rank r
            is on machine r modulo `machines`; or the place of each rank, places being numbered in
            blocks.
        sockets, switches : int
            Number on each machine; places share them in equal parts, in their order.
        storage : str
            What has drives of its own: ``"machine"``, ``"socket"`` or ``"switch"``; or
            ``"shared"``: all write through a NIC of each machine to one file system.
        capacities : Capacities, optional
            Rates.
        storage_mbps : array of int, optional
            A rate for each group of drives (or NIC, if shared), in place of `capacities.storage`.
        """
        counts = np.broadcast_to(np.asarray(per_machine, np.int64), machines)
        if machines < 1 or (counts < 1).any():
            raise UnsupportedError(f"{machines} machines with {per_machine} ranks each")
        place = _order(order, counts)
        machine = np.repeat(np.arange(machines), counts)[place]
        local = (np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts))[place]
        most = counts[machine]
        socket = machine * sockets + np.minimum(local * sockets // most, sockets - 1)
        switch = machine * switches + np.minimum(local * switches // most, switches - 1)
        names = {
            Unit.MACHINE: Named(machines, lambda i: f"node{i}"),
            Unit.SOCKET: _inside(machines, sockets, "socket"),
            Unit.GPU_SWITCH: _inside(machines, switches, "switch"),
            Unit.NIC: _inside(machines, 1, "nic"),
        }
        group, names[Unit.NVME] = {
            "machine": (machine, _inside(machines, 1, "nvme")),
            "socket": (socket, _inside(machines, sockets, "nvme")),
            "switch": (switch, _inside(machines, switches, "nvme")),
            "shared": (np.full_like(machine, -1), Named(0, str)),
        }[storage]
        where = {
            Unit.MACHINE: machine,
            Unit.SOCKET: socket,
            Unit.GPU_SWITCH: switch,
            Unit.NIC: machine,
            Unit.NVME: group,
        }
        rates = capacities or Capacities()
        last = Unit.NIC if storage == "shared" else Unit.NVME
        usual = rates.nic if storage == "shared" else rates.storage
        levels = [streams(len(machine), rates.stream)]
        if rates.switch is not None:
            levels.append(level(Unit.GPU_SWITCH, where, names, rates.switch))
        if (rate := usual if storage_mbps is None else storage_mbps) is not None:
            levels.append(level(last, where, names, rate))
        return cls.of(where, names, levels, rates.filesystem)

    @classmethod
    def of(
        cls,
        where: Mapping[Unit, Integers],
        names: Mapping[Unit, Sequence[str]],
        levels: list[Level],
        filesystem: int | None = None,
        notes: tuple[str, ...] = (),
    ) -> Placement:
        """Return a placement with the forest of these levels, the ranks' streams first.

        Parameters
        ----------
        where, names
            As the class has them.
        levels : list of Level
            What ranks share; see `nest`.
        filesystem : int, optional
            MB/s of a file system that all write to.
        notes : tuple of str
            What is known to be missing.
        """
        ranks = len(where[Unit.MACHINE])
        if filesystem is not None:
            whole = np.zeros(ranks, np.int64)
            levels = [*levels, Level("filesystem", whole, np.array([filesystem]), ["filesystem"])]
        forest, kinds, left_out = nest(levels)
        return cls(dict(where), dict(names), forest, notes + left_out, kinds)


def streams(ranks: int, rate: npt.ArrayLike) -> Level:
    """Return the level of the ranks' own streams, each of this many MB/s."""
    capacity = np.broadcast_to(np.asarray(rate, np.int64), ranks).copy()
    return Level("stream", np.arange(ranks), capacity, Named(ranks, lambda i: f"rank{i}"))


def level(
    unit: Unit,
    where: Mapping[Unit, Integers],
    names: Mapping[Unit, Sequence[str]],
    rate: npt.ArrayLike,
) -> Level:
    """Return the level of a unit's devices, each of this many MB/s."""
    capacity = np.broadcast_to(np.asarray(rate, np.int64), len(names[unit])).copy()
    return Level(unit.value, where[unit], capacity, names[unit])


def _order(order: str | npt.ArrayLike, counts: Integers) -> Integers:
    """Return the place of each rank."""
    total = int(counts.sum())
    if isinstance(order, str):
        if order == "block":
            return np.arange(total)
        if order != "cyclic":
            raise UnsupportedError(f"Order {order!r} is neither block nor cyclic")
        turn = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.lexsort((np.repeat(np.arange(len(counts)), counts), turn))
    place = np.asarray(order, np.int64)
    if place.shape != (total,) or not np.array_equal(np.sort(place), np.arange(total)):
        raise UnsupportedError(f"The order is no permutation of {total} places")
    return place


def _inside(machines: int, each: int, kind: str) -> Sequence[str]:
    number = str if each > 1 else (lambda _: "")
    return Named(machines * each, lambda i: f"node{i // each}/{kind}{number(i % each)}")
