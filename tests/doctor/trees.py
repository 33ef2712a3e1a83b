"""Trees of ``sys`` and ``proc`` of machines with GPUs, with what the doctor reads besides."""

from __future__ import annotations

import os
import struct
from pathlib import Path

from tensorspill.topology import Machine
from tensorspill.topology.machines import machine
from tensorspill.topology.machines.sysfs_tree import write_sysfs

__all__ = ["OPEN_MODULES", "config_with_acs", "gpu_tree", "put"]

OPEN_MODULES = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\n"
    "GCC version:  gcc version 13.3.0\n"
)
_LIMITS = (
    "Limit                     Soft Limit           Hard Limit           Units\n"
    "Max locked memory         unlimited            unlimited            bytes\n"
)


def put(root: Path, path: str, content: str | bytes) -> Path:
    """Write a file of the tree, through its links."""
    full = root / path
    full.parent.mkdir(parents=True, exist_ok=True)
    full.write_bytes(content.encode() if isinstance(content, str) else content)
    return full


def config_with_acs(control: int) -> bytes:
    """Return a PCI configuration space with two extended capabilities, the second of them ACS."""
    config = bytearray(4096)
    struct.pack_into("<I", config, 0x100, 0x150 << 20 | 1 << 16 | 0x0001)
    struct.pack_into("<IHH", config, 0x150, 1 << 16 | 0x000D, 0x5F, control)
    return bytes(config)


def gpu_tree(root: Path, name: str = "dgx-h100", *, ready: bool = True) -> Machine:
    """Write a known machine; if `ready`, with everything that GPUDirect Storage needs."""
    known = machine(name)
    write_sysfs(known, str(root))
    put(root, "proc/sys/kernel/osrelease", "6.8.0-nvidia\n")
    put(root, "proc/sys/fs/aio-nr", "0\n")
    put(root, "proc/sys/fs/aio-max-nr", "65536\n")
    put(root, "proc/self/limits", _LIMITS)
    put(root, "sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
    if not ready:
        return known
    put(root, "proc/driver/nvidia/version", OPEN_MODULES)
    put(root, "proc/driver/nvidia-fs/version", "version: 2.26.6\n")
    put(root, "etc/cufile.json", '{"properties": {"use_pci_p2pdma": false}} // as installed\n')
    for gpu in known.gpus:
        size = gpu.memory_bytes or 80 << 30
        folder = f"sys/bus/pci/devices/{gpu.bdf}"
        if (root / folder).exists():
            regions = f"0xc0000000 0xc0ffffff 0x40200\n0x0 {size - 1:#x} 0x14220c\n"
            put(root, f"{folder}/resource", regions)
        for bridge in known.ancestors(gpu):
            above = f"sys/bus/pci/devices/{bridge.name}"
            if os.path.exists(root / above):
                put(root, f"{above}/config", config_with_acs(0))
    return known
