"""Which of several folders a rank should use: the one on the nearest drive."""

from __future__ import annotations

import os
from collections.abc import Iterable

from tensorspill.errors import UnsupportedError
from tensorspill.topology.affinity import affinities
from tensorspill.topology.discovery import device_of, discover
from tensorspill.topology.discovery.paths import Storage, storage_of
from tensorspill.topology.distances import CLASSES, Distance, distance, distance_from_cpus
from tensorspill.topology.machine import Gpu, Machine
from tensorspill.topology.process import Process, VisibleGpu, current_process, gpu_of_rank
from tensorspill.topology.ranks.launch import LaunchedRank, launched

__all__ = ["nearest_folder"]


def nearest_folder(
    folders: Iterable[str | os.PathLike[str]],
    machine: Machine | None = None,
    launch: LaunchedRank | None = None,
    process: Process | None = None,
) -> str:
    """Return the folder whose drive is nearest to this rank's GPU, or to its CPUs.

    Ranks of a node to which several are equally near are spread over these. Called by each rank
    with the same folders, in the same order.

    Parameters
    ----------
    folders : iterable of path-like
        One on each drive that may be used. They need not exist.
    machine, launch, process
        What to go by; by default what is discovered here.

    Raises
    ------
    UnsupportedError
        There is no folder, or the launcher's variables contradict each other.
    BrokenError
        A folder can't be looked at.

    Examples
    --------
    >>> folder = nearest_folder(["/mnt/nvme0", "/mnt/nvme1"])  # doctest: +SKIP
    >>> model = tensorspill.offload(model, folder)  # doctest: +SKIP
    """
    paths = [os.fspath(folder) for folder in folders]
    if not paths:
        raise UnsupportedError("There is no folder to choose from")
    here = discover() if machine is None else machine
    launch = launch or launched()
    process = process or current_process()
    gpu, node = _place(here, launch, process)
    storages = [device_of(p) if machine is None else storage_of(machine, p) for p in paths]
    far = [_far(here, gpu, node, storage) for storage in storages]
    nearest = [path for path, rank in zip(paths, far, strict=True) if rank == min(far)]
    return nearest[launch.local_rank % len(nearest)]


def _place(
    machine: Machine, launch: LaunchedRank, process: Process
) -> tuple[Gpu | None, int | None]:
    """Return a rank's GPU and NUMA node, as far as they are known."""
    device: VisibleGpu | None = None
    if machine.gpus:
        try:
            device = gpu_of_rank(machine, process, launch.local_rank, launch.rank)
        except UnsupportedError:  # more ranks than GPUs: they compute on CPUs
            device = None
    affinity = affinities(machine, [device], process)[0]
    gpu = next((gpu for gpu in machine.gpus if gpu.bdf and gpu.bdf == affinity.gpu), None)
    return gpu, affinity.numa_node


def _far(machine: Machine, gpu: Gpu | None, node: int | None, storage: Storage) -> int:
    """Return how far the furthest drive below a path is, as a place from near to far."""
    drives = [drive for drive in machine.drives if drive.name in storage.drives]
    if not drives:
        return len(CLASSES)
    found: list[Distance] = [
        distance_from_cpus(machine, node, drive) if gpu is None else distance(machine, gpu, drive)
        for drive in drives
    ]
    return max(one.rank for one in found)
