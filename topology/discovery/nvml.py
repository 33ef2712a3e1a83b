"""What only the NVIDIA driver knows about GPUs, through NVML as cuda-python binds it."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tensorspill.topology.bdf import as_bdf
from tensorspill.topology.machine import Gpu, Mig, NvLink

__all__ = ["ask_driver", "driver_is_there", "with_nvml"]

#: The most links that a GPU of any generation has so far.
_LINKS = 18
_CPU_WORDS = 64
_HIDDEN = "NVML does not show this GPU to this process"


def driver_is_there() -> bool:
    """Return whether the NVIDIA driver is loaded; nothing is imported to find out."""
    return os.path.exists("/proc/driver/nvidia/version") or os.path.exists("/dev/nvidiactl")


def ask_driver(gpus: tuple[Gpu, ...], notes: list[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with what NVML says of them, or unchanged and a note why not."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
    except Exception as error:
        # Whatever a driver or binding of another release raises, the machine is there without it.
        notes.append(f"NVML was not asked: {type(error).__name__}: {error}")
        return gpus
    try:
        return with_nvml(gpus, nvml, notes)
    finally:
        nvml.shutdown()


def with_nvml(gpus: tuple[Gpu, ...], nvml: Any, notes: list[str]) -> tuple[Gpu, ...]:
    """Return the GPUs with what NVML says of them, joined by PCI address.

    Parameters
    ----------
    gpus : tuple of Gpu
        From sysfs; those that NVML does not show lose their index.
    nvml : module
        ``cuda.bindings.nvml``, initialised.
    notes : list of str
        Takes what could not be asked.
    """
    known = {gpu.bdf: gpu for gpu in gpus}
    seen: set[str | None] = set()
    for index in range(_ask(nvml.device_get_count_v2, (), 0, notes)):
        handle = _ask(nvml.device_get_handle_by_index_v2, (index,), None, notes)
        if handle is None:
            continue
        info = _ask(nvml.device_get_pci_info_v3, (handle,), None, notes)
        bdf = as_bdf(_plain(info.bus_id)) if info is not None else None
        why = (("parent", "not in sysfs"), ("numa_node", "not in sysfs"))
        known[bdf] = _joined(known.get(bdf) or Gpu(bdf=bdf, unknown=why), index, handle, nvml)
        seen.add(bdf)
    hidden = {bdf: gpu for bdf, gpu in known.items() if bdf not in seen}
    for bdf, gpu in hidden.items():
        known[bdf] = replace(gpu, index=None, unknown=(*gpu.unknown, ("index", _HIDDEN)))
    return tuple(sorted(known.values(), key=lambda gpu: gpu.bdf or ""))


def _joined(gpu: Gpu, index: int, handle: int, nvml: Any) -> Gpu:
    """Return a GPU with the fields that NVML knows."""
    reasons = dict(gpu.unknown)

    def field(name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(handle, *arguments)
        except Exception as error:
            reasons[name] = f"NVML: {error}"
            return None

    memory = field("memory_bytes", nvml.device_get_memory_info_v2)
    name = field("name", nvml.device_get_name)
    # Where GPUs are NUMA nodes, this is the node of the GPU's own memory.
    memory_node = field("memory_node", nvml.device_get_numa_node_id)
    uuid = field("uuid", nvml.device_get_uuid)
    masks = field("cpus", nvml.device_get_cpu_affinity, _CPU_WORDS) if not gpu.cpus else None
    return replace(
        gpu,
        index=index,
        name=_plain(name) if name else gpu.name,
        uuid=_plain(uuid) if uuid else gpu.uuid,
        cpus=gpu.cpus or _bits(masks),
        memory_bytes=int(memory.total) if memory is not None else None,
        memory_node=int(memory_node) if memory_node is not None and memory_node >= 0 else None,
        nvlinks=_nvlinks(handle, nvml),
        migs=_migs(handle, nvml),
        unknown=tuple(reasons.items()),
    )


def _nvlinks(handle: int, nvml: Any) -> tuple[NvLink, ...]:
    found: Counter[str] = Counter()
    for link in range(_LINKS):
        if _ask(nvml.device_get_nvlink_state, (handle, link), 0) != 1:
            continue
        # Virtual machines hide the switches: what is no GPU counts as one.
        if _ask(nvml.device_get_nvlink_remote_device_type, (handle, link), 2) == 0:
            info = _ask(nvml.device_get_nvlink_remote_pci_info_v2, (handle, link), None)
            if info is not None:
                found[as_bdf(_plain(info.bus_id))] += 1
        else:
            found["nvswitch"] += 1
    return tuple(NvLink(peer=peer, count=count) for peer, count in sorted(found.items()))


def _migs(handle: int, nvml: Any) -> tuple[Mig, ...]:
    if _ask(nvml.device_get_mig_mode, (handle,), (0, 0))[0] != 1:
        return ()
    found = []
    for index in range(_ask(nvml.device_get_max_mig_device_count, (handle,), 0)):
        slice_ = _ask(nvml.device_get_mig_device_handle_by_index, (handle, index), None)
        if slice_ is None:
            continue
        uuid = _ask(nvml.device_get_uuid, (slice_,), None)
        memory = _ask(nvml.device_get_memory_info_v2, (slice_,), None)
        size = int(memory.total) if memory is not None else None
        found.append(Mig(index=index, uuid=_plain(uuid) if uuid else None, memory_bytes=size))
    return tuple(found)


def _ask(
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    default: Any,
    notes: list[str] | None = None,
) -> Any:
    """Return what NVML says, or the default if it refuses."""
    try:
        return call(*arguments)
    except Exception as error:
        if notes is not None:
            notes.append(f"NVML: {getattr(call, '__name__', 'call')}: {error}")
        return default


def _plain(text: str | bytes) -> str:
    return (text.decode("ascii", "replace") if isinstance(text, bytes) else text).strip("\x00 ")


def _bits(words: Any) -> tuple[int, ...]:
    """Return the numbers of the bits that are set in words of 64."""
    if words is None:
        return ()
    values = [int(word) for word in words]
    return tuple(64 * i + b for i, word in enumerate(values) for b in range(64) if word >> b & 1)
