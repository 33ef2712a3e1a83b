"""What is near each rank: its GPU, NIC, drive, socket, memory and CPUs."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tensorspill.errors import UnsupportedError
from tensorspill.topology.discovery.paths import Storage
from tensorspill.topology.distances import Distance, distance, distance_from_cpus, nearest
from tensorspill.topology.machine import Device, Drive, Gpu, Machine
from tensorspill.topology.process import Process, VisibleGpu
from tensorspill.topology.record import Record

__all__ = [
    "Affinity",
    "affinities",
    "crossing",
    "label_of",
    "rank_distance",
    "warn_if_crossing",
]

log = logging.getLogger(__name__)

_NO_GPU = "the rank has no GPU"


@dataclass(frozen=True, kw_only=True)
class Affinity(Record):
    """What is near a rank.

    Attributes
    ----------
    rank : int
        Its number on this machine.
    gpu : str or None
        PCI address; with `mig`, the UUID of the slice or an empty string.
    nic, drive : str or None
        Names of its nearest NIC and drive. Ranks to which the same ones are equally near are spread
        over them.
    nics, drives : tuple of str
        All that are as near.
    nic_distance, drive_distance : str
        How near: a class of `tensorspill.topology.distances`.
    numa_node, socket : int or None
        Where its CPUs are.
    cpus : tuple of int
        CPUs that it should use: those near its GPU that it may use; all that it may use where the
        two have none in common.
    """

    rank: int
    gpu: str | None = None
    mig: str = ""
    nic: str | None = None
    drive: str | None = None
    nics: tuple[str, ...] = ()
    drives: tuple[str, ...] = ()
    nic_distance: str = "?"
    drive_distance: str = "?"
    numa_node: int | None = None
    socket: int | None = None
    cpus: tuple[int, ...] = ()


def affinities(
    machine: Machine,
    devices: Sequence[VisibleGpu | str | int | None] | None = None,
    process: Process | None = None,
    *,
    share: bool = False,
) -> tuple[Affinity, ...]:
    """Return what is near each rank of a machine.

    Parameters
    ----------
    machine : Machine
        Where the ranks are.
    devices : sequence, optional
        For each rank its GPU, as `gpu_of_rank` returns it or by index, PCI address or UUID; None
        for a rank without a GPU. By default each GPU has a rank.
    process : Process, optional
        What the ranks may use; by default everything.
    share : bool
        Let ranks share a GPU.

    Raises
    ------
    UnsupportedError
        A rank names no GPU of this machine, or two ranks have the same GPU or slice of one; the
        error names the ranks.
    """
    if devices is None:
        devices = [VisibleGpu(bdf=gpu.bdf) for gpu in machine.gpus]
    ranks = [_resolved(machine, rank, device) for rank, device in enumerate(devices)]
    if not share:
        _check_sharing(ranks)
    spread = _Spread()
    return tuple(
        _affinity(machine, rank, gpu, device, process, spread)
        for rank, (gpu, device) in enumerate(ranks)
    )


def _resolved(
    machine: Machine, rank: int, device: VisibleGpu | str | int | None
) -> tuple[Gpu | None, VisibleGpu]:
    if device is None:
        return None, VisibleGpu(unknown=(("bdf", _NO_GPU),))
    if not isinstance(device, VisibleGpu):
        try:
            device = VisibleGpu(bdf=machine.gpu(device).bdf)
        except UnsupportedError as error:
            raise UnsupportedError(f"Rank {rank}: {error.message}") from error
    if device.bdf is None:
        return None, device
    gpu = next((gpu for gpu in machine.gpus if gpu.bdf == device.bdf), None)
    if gpu is None:
        where = machine.hostname or "this machine"
        raise UnsupportedError(f"Rank {rank}: {where} has no GPU {device.bdf}")
    return gpu, device


def _check_sharing(ranks: list[tuple[Gpu | None, VisibleGpu]]) -> None:
    seen: dict[tuple[str, str], int] = {}
    for rank, (gpu, device) in enumerate(ranks):
        if gpu is None or gpu.bdf is None:
            continue
        other = seen.setdefault((gpu.bdf, device.mig), rank)
        if other != rank:
            what = f"slice {device.mig}" if device.mig else f"GPU {gpu.bdf}"
            raise UnsupportedError(f"Ranks {other} and {rank} have the same {what}")


class _Spread:
    """Gives equally near devices to ranks in turn."""

    def __init__(self) -> None:
        self._used: Counter[str] = Counter()

    def pick(self, names: tuple[str, ...]) -> str | None:
        """Return the one that the fewest ranks have, the first of those."""
        if not names:
            return None
        chosen = min(names, key=lambda name: self._used[name])
        self._used[chosen] += 1
        return chosen


def _affinity(
    machine: Machine,
    rank: int,
    gpu: Gpu | None,
    device: VisibleGpu,
    process: Process | None,
    spread: _Spread,
) -> Affinity:
    node, why = _node(machine, gpu, process)
    # Without a GPU, what is near its CPUs is near the rank.
    here = node if gpu is None else gpu
    to_nics, nics = nearest(machine, here, [nic for nic in machine.nics if nic.up is not False])
    to_drives, drives = nearest(machine, here, _preferred(machine))
    nic_names = tuple(nic.name for nic in nics)
    drive_names = tuple(drive.name for drive in drives)
    known = machine.node(node)
    return Affinity(
        rank=rank,
        gpu=None if gpu is None else gpu.bdf,
        mig=device.mig,
        nic=spread.pick(nic_names),
        drive=spread.pick(drive_names),
        nics=nic_names,
        drives=drive_names,
        nic_distance=to_nics.kind,
        drive_distance=to_drives.kind,
        numa_node=node,
        socket=None if known is None else known.socket,
        cpus=_cpus(machine, gpu, node, process),
        unknown=(
            ("gpu", device.why("bdf") or _NO_GPU),
            ("nic", _missing(to_nics, "NIC that is up")),
            ("drive", _missing(to_drives, "drive")),
            ("numa_node", why),
            ("socket", why or (known.why("socket") if known else "its NUMA node has no record")),
        ),
    )


def _preferred(machine: Machine) -> list[Drive]:
    """Return the NVMe drives, or all drives where there are none."""
    return [drive for drive in machine.drives if drive.kind == "nvme"] or list(machine.drives)


def _missing(to: Distance, what: str) -> str:
    return f"{to.reason}: no {what}" if to.reason else f"no {what}"


def _node(machine: Machine, gpu: Gpu | None, process: Process | None) -> tuple[int | None, str]:
    """Return the NUMA node of a rank, or None and the reason."""
    if gpu is not None and gpu.numa_node is not None:
        return gpu.numa_node, ""
    with_cpus = [node for node in machine.nodes if not node.memory_only]
    if len(with_cpus) == 1:
        return with_cpus[0].index, ""
    allowed = set(process.cpus if process is not None else ())
    near = set(gpu.cpus if gpu is not None else ()) or allowed
    fits = [node.index for node in with_cpus if near and near <= set(node.cpus)]
    if fits:
        return fits[0], ""
    if gpu is not None:
        return None, gpu.why("numa_node")
    return None, "the rank may run on several NUMA nodes"


def _cpus(
    machine: Machine, gpu: Gpu | None, node: int | None, process: Process | None
) -> tuple[int, ...]:
    """Return the near CPUs that may be used; an empty intersection means the mask is wrong."""
    known = machine.node(node)
    near = (gpu.cpus if gpu is not None else ()) or (known.cpus if known else ())
    if process is None or not process.cpus:
        return near
    return tuple(sorted(set(near) & set(process.cpus))) or process.cpus


def rank_distance(machine: Machine, rank: Affinity, device: Device) -> Distance:
    """Return how far a device is from a rank: from its GPU, or from its CPUs if it has none."""
    gpu = next((gpu for gpu in machine.gpus if gpu.bdf and gpu.bdf == rank.gpu), None)
    if gpu is None:
        return distance_from_cpus(machine, rank.numa_node, device)
    return distance(machine, gpu, device)


def label_of(device: Device) -> str:
    """Return what people call a device."""
    return f"GPU{device.index}" if isinstance(device, Gpu) else device.name


def crossing(machine: Machine, affinity: Affinity, storage: Storage) -> str | None:
    """Return what it costs a rank to write to a path on another socket, or None if it's on none.

    Parameters
    ----------
    machine : Machine
        Where both are.
    affinity : Affinity
        Of the rank.
    storage : Storage
        What `device_of` says of the path.
    """
    drives = [drive for drive in machine.drives if drive.name in storage.drives]
    far = [d for d in drives if machine.socket_of(d) not in (None, affinity.socket)]
    if affinity.socket is None or not far:
        return None
    names = ", ".join(drive.name for drive in far)
    text = (
        f"Rank {affinity.rank} is on socket {affinity.socket}, but {len(far) / len(drives):.0%} of "
        f"what it writes to {storage.path} goes to drives of other sockets ({names}): these bytes "
        f"cross the link between sockets{_cost(machine, affinity, far)}"
    )
    nearer = [name for name in affinity.drives if name not in storage.drives]
    if affinity.drive_distance in ("SYS", "?") or not nearer:
        return text
    return f"{text}. {', '.join(nearer)} would be nearer ({affinity.drive_distance})"


def _cost(machine: Machine, affinity: Affinity, far: list[Drive]) -> str:
    """Return what the way costs: how far the memory is, and what direct transfers meet."""
    words = [""]
    own = machine.node(affinity.numa_node)
    place = {node.index: i for i, node in enumerate(machine.nodes)}
    others = [place[d.numa_node] for d in far if d.numa_node in place]
    if own is not None and len(own.distances) == len(place) and others:
        times = max(own.distances[i] for i in others) / own.distances[place[own.index]]
        words.append(f"to memory that is {times:.1f} times as far by the firmware's table")
    gpu = next((gpu for gpu in machine.gpus if gpu.bdf and gpu.bdf == affinity.gpu), None)
    if gpu is not None:
        kinds = "/".join(sorted({distance(machine, gpu, drive).kind for drive in far}))
        words.append(f"and a direct transfer from the GPU would cross it as well ({kinds})")
    return ", ".join(words)


def warn_if_crossing(machine: Machine, affinity: Affinity, storage: Storage) -> str | None:
    """Log what `crossing` returns as a warning, and return it."""
    text = crossing(machine, affinity, storage)
    if text is not None:
        log.warning("%s", text)
    return text
