"""The placement of ranks on machines that are known: discovered, or described by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tensorspill.errors import UnsupportedError
from tensorspill.topology.affinity import Affinity, affinities
from tensorspill.topology.machine import Drive, Machine
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.nesting import Level
from tensorspill.topology.ranks.placement import Placement, Unit, streams
from tensorspill.topology.sequences import Named
from tensorspill.topology.solver.arrays import Integers

__all__ = ["STORAGE", "place_on"]

#: What the ranks of a machine write to.
STORAGE = ("machine", "socket", "nearest", "shared")

_LOCAL = (Unit.SOCKET, Unit.GPU_SWITCH, Unit.NIC, Unit.NVME)


@dataclass(frozen=True, eq=False)
class _Kind:
    """One kind of machine: devices of each local rank by number, their names and rates."""

    device: dict[str, Integers]
    names: dict[str, list[str]]
    rates: dict[str, list[int]]
    stream: list[int]


def place_on(
    machines: Sequence[Machine],
    *,
    ranks: Sequence[tuple[int, int]] | npt.ArrayLike | None = None,
    storage: str = "machine",
    capacities: Capacities | None = None,
) -> Placement:
    """Return where ranks are on known machines.

    Parameters
    ----------
    machines : sequence of Machine
        The cluster. Machines that share their parts are looked at once.
    ranks : sequence of (machine, local rank), optional
        Where each rank is. By default each GPU has one, machine after machine.
    storage : str
        What ranks write to: all drives of their ``"machine"`` together, those of their
        ``"socket"``, the one that is ``"nearest"``, or a ``"shared"`` file system through their
        NIC.
    capacities : Capacities, optional
        Rates where the machines don't give any.

    Raises
    ------
    UnsupportedError
        A machine has nothing of what `storage` asks for, or a rank is on a machine or GPU that does
        not exist.
    """
    if storage not in STORAGE:
        raise UnsupportedError(f"Storage {storage!r} is none of {', '.join(STORAGE)}")
    usual = capacities or Capacities()
    kinds: dict[int, _Kind] = {}
    every = []
    for machine in machines:
        key = id(machine.gpus) if machine.gpus else id(machine)
        if key not in kinds:
            kinds[key] = _kind(machine, storage, usual)
        every.append(kinds[key])
    where = _locations(every, machines, ranks)
    hosts = [machine.hostname or f"node{i}" for i, machine in enumerate(machines)]
    if len(set(hosts)) < len(hosts):
        hosts = [f"node{i}" for i in range(len(hosts))]
    return _assemble(every, hosts, where, storage, usual)


def _kind(machine: Machine, storage: str, usual: Capacities) -> _Kind:
    near = affinities(machine)
    kind = _Kind({}, {}, {}, [])
    links = {gpu.bdf: gpu.link_mbps for gpu in machine.gpus}
    kind.stream.extend(min(usual.stream, links.get(a.gpu) or usual.stream) for a in near)
    sockets = [None if a.socket is None else f"socket{a.socket}" for a in near]
    _number(kind, Unit.SOCKET.value, sockets, {})
    switches = [_switch(machine, a) for a in near]
    uplinks = {bridge.name: bridge.link_mbps for bridge in machine.bridges}
    _number(kind, Unit.GPU_SWITCH.value, switches, uplinks, usual.switch)
    nics = {nic.name: _least(nic.mbps, nic.link_mbps) for nic in machine.nics}
    _number(kind, Unit.NIC.value, [a.nic for a in near], nics, usual.nic)
    drives = {drive.name: _rate(drive) for drive in machine.drives}
    _number(kind, Unit.NVME.value, [a.drive for a in near], drives, usual.storage)
    groups, rates = _groups(machine, near, storage, usual)
    _number(kind, "storage", groups, rates, usual.storage)
    return kind


def _number(
    kind: _Kind,
    what: str,
    devices: Sequence[str | None],
    rates: dict[str, int | None],
    usual: int | None = None,
) -> None:
    """Give the devices of the local ranks numbers, in the order in which they occur."""
    names = list(dict.fromkeys(name for name in devices if name is not None))
    numbers = {name: i for i, name in enumerate(names)}
    kind.device[what] = np.array([-1 if n is None else numbers[n] for n in devices], np.int64)
    kind.names[what] = names
    kind.rates[what] = [rates.get(name) or usual or 1 for name in names]


def _switch(machine: Machine, near: Affinity) -> str | None:
    return None if near.gpu is None else machine.switch_of(machine.gpu(near.gpu))


def _least(*rates: int | None) -> int | None:
    return min((rate for rate in rates if rate), default=None)


def _rate(drive: Drive) -> int | None:
    return _least(drive.write_mbps, drive.link_mbps)


def _groups(
    machine: Machine, near: Sequence[Affinity], storage: str, usual: Capacities
) -> tuple[list[str | None], dict[str, int | None]]:
    """Return what each local rank writes to, and the rate of each of these."""
    if storage == "shared":
        rates = {nic.name: _least(nic.mbps, nic.link_mbps) or usual.nic for nic in machine.nics}
        groups = [a.nic for a in near]
    else:
        drives = [drive for drive in machine.drives if drive.kind == "nvme"]
        if storage == "nearest":
            groups = [a.drive for a in near]
            rates = {drive.name: _rate(drive) for drive in machine.drives}
        else:
            groups, rates = _together(machine, near, drives, storage == "socket", usual)
    for rank, group in enumerate(groups):
        if group is None:
            what = "NIC" if storage == "shared" else "NVMe drive"
            raise UnsupportedError(
                f"{machine.hostname or 'The machine'}: local rank {rank} has no {what} to write "
                f"through (storage is {storage!r})",
                remedy="Choose another storage, or give the drives",
            )
    return groups, rates


def _together(
    machine: Machine,
    near: Sequence[Affinity],
    drives: Sequence[Drive],
    by_socket: bool,
    usual: Capacities,
) -> tuple[list[str | None], dict[str, int | None]]:
    """Return one group of drives for the machine, or one for each socket."""
    rates: dict[str, int | None] = {}
    for drive in drives:
        name = f"drives-socket{machine.socket_of(drive)}" if by_socket else "drives"
        rates[name] = (rates.get(name) or 0) + (_rate(drive) or usual.storage or 1)
    names = [f"drives-socket{a.socket}" if by_socket else "drives" for a in near]
    return [name if name in rates else None for name in names], rates


def _locations(
    kinds: Sequence[_Kind],
    machines: Sequence[Machine],
    ranks: Sequence[tuple[int, int]] | npt.ArrayLike | None,
) -> Integers:
    """Return (machine, local rank) of each rank, checked."""
    counts = np.array([len(kind.stream) for kind in kinds], np.int64)
    if ranks is None:
        machine = np.repeat(np.arange(len(kinds)), counts)
        local = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        found = np.stack([machine, local], axis=1)
    else:
        found = np.asarray(ranks, np.int64).reshape(-1, 2)
    if not len(found):
        raise UnsupportedError("There are no ranks: the machines have no GPUs")
    for rank, (machine, local) in enumerate(found.tolist()):
        if not 0 <= machine < len(kinds):
            raise UnsupportedError(f"Rank {rank} is on machine {machine} of {len(kinds)}")
        if not 0 <= local < counts[machine]:
            host = machines[machine].hostname or f"machine {machine}"
            raise UnsupportedError(
                f"Rank {rank} has no device: it is number {local} on {host}, which has "
                f"{counts[machine]} GPUs"
            )
    _twice(found)
    return found


def _twice(found: Integers) -> None:
    order = np.lexsort(found.T)
    same = np.flatnonzero((np.diff(found[order], axis=0) == 0).all(axis=1))
    if len(same):
        a, b = sorted((int(order[same[0]]), int(order[same[0] + 1])))
        machine, local = found[a].tolist()
        raise UnsupportedError(f"Ranks {a} and {b} are both on GPU {local} of machine {machine}")


def _assemble(
    kinds: Sequence[_Kind], hosts: Sequence[str], at: Integers, storage: str, usual: Capacities
) -> Placement:
    """Return the placement on all machines, whose devices get numbers over all of them."""
    where: dict[Unit, Integers] = {Unit.MACHINE: at[:, 0]}
    names: dict[Unit, Sequence[str]] = {Unit.MACHINE: list(hosts)}
    rates: dict[Unit, Integers] = {}
    every = {
        what: _over_all(kinds, hosts, at, what)
        for what in (*(unit.value for unit in _LOCAL), "storage")
    }
    for unit in _LOCAL:
        where[unit], names[unit], rates[unit] = every[unit.value]
    stream = np.array([kinds[m].stream[i] for m, i in at.tolist()], np.int64)
    levels = [streams(len(at), stream)]
    if usual.switch is not None:
        rate, label = rates[Unit.GPU_SWITCH], names[Unit.GPU_SWITCH]
        levels.append(Level(Unit.GPU_SWITCH.value, where[Unit.GPU_SWITCH], rate, label))
    group, labels, rate = every["storage"]
    levels.append(Level("storage" if storage != "shared" else "nic", group, rate, labels))
    return Placement.of(where, names, levels, usual.filesystem)


def _over_all(
    kinds: Sequence[_Kind], hosts: Sequence[str], at: Integers, what: str
) -> tuple[Integers, Named, Integers]:
    """Return each rank's device, numbered over all machines, with all names and rates."""
    counts = np.array([len(kind.names[what]) for kind in kinds], np.int64)
    first = np.cumsum(counts) - counts
    local = np.array([kinds[m].device[what][i] for m, i in at.tolist()], np.int64)
    number = np.where(local < 0, -1, first[at[:, 0]] + local)
    rates = [rate for kind in kinds for rate in kind.rates[what]]

    def name(index: int) -> str:
        machine = int(np.searchsorted(first, index, side="right")) - 1
        return f"{hosts[machine]}/{kinds[machine].names[what][index - int(first[machine])]}"

    return number, Named(int(counts.sum()), name), np.array(rates, np.int64)
