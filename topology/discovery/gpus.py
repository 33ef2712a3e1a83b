"""GPUs, from sysfs and the NVIDIA driver's folder in procfs."""

from __future__ import annotations

import re

from tensorspill.topology.bdf import is_bdf
from tensorspill.topology.discovery.pci import PciTree
from tensorspill.topology.discovery.sysfs import Files, Reading
from tensorspill.topology.machine import Gpu

__all__ = ["read_gpus"]

_DEVICES = "sys/bus/pci/devices"
_DRIVER = "proc/driver/nvidia/gpus"

#: By vendor, the classes of devices that compute: VGA, 3D, display, processing accelerator.
_CLASSES = {
    "0x10de": ("0x0300", "0x0302"),
    "0x1002": ("0x0300", "0x0302", "0x0380", "0x1200"),
}
_UUID = re.compile(r"GPU UUID:\s*(GPU-[0-9a-fA-F-]{8,40})")
_MINOR = re.compile(r"Device Minor:\s*([0-9]{1,3})")
_MODEL = re.compile(r"Model:[ \t]*(\S[^\n]{0,99})")


def read_gpus(files: Files, tree: PciTree) -> tuple[Gpu, ...]:
    """Return the GPUs by PCI address.

    Their index is their place in that order, as NVML numbers them; those whose device file is not
    in this container are skipped, as NVML does.
    """
    found: dict[str, Gpu] = {}
    index = 0
    for name in files.names(_DEVICES):
        folder = f"{_DEVICES}/{name}"
        if is_bdf(name) and _computes(files, folder):
            gpu = _read_gpu(files, tree, folder, index)
            if gpu.bdf and gpu.bdf not in found:
                found[gpu.bdf] = gpu
                index += gpu.index is not None
    return tuple(found.values())


def _computes(files: Files, folder: str) -> bool:
    kind = files.text(f"{folder}/class")[0] or ""
    if kind[:4] not in ("0x03", "0x12"):
        return False
    return kind[:6] in _CLASSES.get(files.text(f"{folder}/vendor")[0] or "", ())


def _read_gpu(files: Files, tree: PciTree, folder: str, index: int) -> Gpu:
    reading = Reading(files)
    place = tree.place(folder, reading)
    path = f"{_DRIVER}/{place.bdf}/information"
    text, why = files.text(path)
    uuid, model = _UUID.search(text or ""), _MODEL.search(text or "")
    hidden = _hidden(files, text or "")
    if hidden:
        reading.reasons["index"] = f"/{hidden} is not in this container"
    reading.reasons |= {
        "uuid": why or f"/{path} does not say",
        "memory_bytes": "only NVML says",
        "memory_node": "only NVML says",
    }
    return Gpu(
        index=None if hidden else index,
        uuid=uuid[1] if uuid else None,
        name=model[1].strip() if model else "",
        bdf=place.bdf,
        parent=place.parent,
        numa_node=place.numa_node,
        cpus=place.cpus,
        link_mbps=place.link_mbps,
        unknown=reading.unknown,
    )


def _hidden(files: Files, information: str) -> str | None:
    """Return the device file that a GPU should have and that isn't there, if any is."""
    minor = _MINOR.search(information)
    if minor is None or not files.exists("dev/nvidiactl"):
        return None
    path = f"dev/nvidia{minor[1]}"
    return None if files.exists(path) else path
