"""What this process may use: its CPUs, memory nodes and GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from tensorspill.errors import UnsupportedError
from tensorspill.topology.discovery.sysfs import Files, cpu_list
from tensorspill.topology.machine import Gpu, Machine
from tensorspill.topology.record import Record

__all__ = ["Process", "VisibleGpu", "current_process", "gpu_of_rank", "visible_gpus"]

_STATUS = "proc/self/status"


@dataclass(frozen=True, kw_only=True)
class Process(Record):
    """What a process may use.

    Attributes
    ----------
    cpus, nodes : tuple of int
        CPUs that it may run on and NUMA nodes that it may take memory from; none if unknown.
    visible : str or None
        ``CUDA_VISIBLE_DEVICES``; None if it is not set, so that all GPUs are visible.
    order : str
        ``CUDA_DEVICE_ORDER``: how CUDA numbers GPUs.
    """

    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    visible: str | None = None
    order: str = "FASTEST_FIRST"


@dataclass(frozen=True, kw_only=True)
class VisibleGpu(Record):
    """One of CUDA's devices: the GPU's PCI address, and the UUID of a MIG slice or nothing."""

    bdf: str | None = None
    mig: str = ""


def current_process(root: str = "/", environ: Mapping[str, str] | None = None) -> Process:
    """Return what this process may use; never raises.

    Parameters
    ----------
    root : str
        Folder that holds ``proc``.
    environ : mapping of str, optional
        In place of this process's environment.
    """
    environ = os.environ if environ is None else environ
    status, _ = Files(root).text(_STATUS)
    return Process(
        cpus=_allowed(status or "", "Cpus"),
        nodes=_allowed(status or "", "Mems"),
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        order=environ.get("CUDA_DEVICE_ORDER") or "FASTEST_FIRST",
        unknown=(("visible", "CUDA_VISIBLE_DEVICES is not set"),),
    )


def _allowed(status: str, what: str) -> tuple[int, ...]:
    match = re.search(rf"^{what}_allowed_list:\s*(\S+)", status, re.MULTILINE)
    return cpu_list(match[1]) or () if match else ()


def visible_gpus(machine: Machine, process: Process) -> tuple[VisibleGpu, ...]:
    """Return CUDA's devices in CUDA's order, whose numbers are not NVML's.

    As in CUDA, the list of `Process.visible` ends at the first entry that is no GPU. A number in it
    can't be resolved where GPUs of several models are ordered by speed: that device is unknown.

    Raises
    ------
    UnsupportedError
        An entry is ambiguous, or a device is named twice.
    """
    if process.visible is None:
        count = sum(gpu.index is not None for gpu in machine.gpus)
        return tuple(_by_number(machine, process, number) for number in range(count))
    found: list[VisibleGpu] = []
    for entry in filter(None, (part.strip() for part in process.visible.split(","))):
        device = _named(machine, process, entry)
        if device is None:
            break
        if device.bdf and device in found:
            raise UnsupportedError(
                f"CUDA_VISIBLE_DEVICES={process.visible!r} names the GPU {device.bdf} twice"
            )
        found.append(device)
    return tuple(found)


def gpu_of_rank(machine: Machine, process: Process, local_rank: int, rank: int) -> VisibleGpu:
    """Return the GPU of a rank: the one visible, or else the one with its local number.

    Raises
    ------
    UnsupportedError
        Fewer GPUs are visible; the error names the rank.
    """
    devices = visible_gpus(machine, process)
    if len(devices) == 1:
        return devices[0]
    if not 0 <= local_rank < len(devices):
        visible = process.visible
        shown = "not set" if visible is None else repr(visible)
        raise UnsupportedError(
            f"Rank {rank} has no GPU: its local rank is {local_rank}, and {len(devices)} GPUs of "
            f"{machine.hostname or 'this machine'} are visible (CUDA_VISIBLE_DEVICES is {shown})",
            remedy="Start as many ranks on a node as GPUs are visible to them",
        )
    return devices[local_rank]


def _named(machine: Machine, process: Process, entry: str) -> VisibleGpu | None:
    if re.fullmatch("[0-9]{1,4}", entry):
        within = int(entry) < sum(gpu.index is not None for gpu in machine.gpus)
        return _by_number(machine, process, int(entry)) if within else None
    if entry.startswith("MIG-"):
        return _mig(machine, entry)
    found = [gpu for gpu in machine.gpus if _fits(gpu, entry)]
    if len(found) > 1:
        raise UnsupportedError(f"CUDA_VISIBLE_DEVICES: {entry!r} fits {len(found)} GPUs")
    return VisibleGpu(bdf=found[0].bdf) if found else None


def _fits(gpu: Gpu, entry: str) -> bool:
    return entry.startswith("GPU-") and len(entry) > 4 and (gpu.uuid or "").startswith(entry)


def _mig(machine: Machine, entry: str) -> VisibleGpu | None:
    """Return a slice by its UUID, or by the older ``MIG-GPU-<uuid>/<instance>/<instance>``."""
    if entry.startswith("MIG-GPU-"):
        uuid = entry.removeprefix("MIG-").split("/")[0]
        gpus = [gpu for gpu in machine.gpus if gpu.uuid == uuid]
        return VisibleGpu(bdf=gpus[0].bdf, mig=entry) if gpus else None
    for gpu in machine.gpus:
        for mig in gpu.migs:
            if mig.uuid == entry:
                return VisibleGpu(bdf=gpu.bdf, mig=entry)
    return None


def _by_number(machine: Machine, process: Process, number: int) -> VisibleGpu:
    """Return CUDA's device of a number where every GPU is visible."""
    gpus = sorted((g for g in machine.gpus if g.index is not None), key=lambda g: g.bdf or "")
    if process.order != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        why = "GPUs of several models are numbered by speed; set CUDA_DEVICE_ORDER=PCI_BUS_ID"
        return VisibleGpu(unknown=(("bdf", why),))
    return VisibleGpu(bdf=gpus[number].bdf)
