"""The bus between drives and GPUs: address translation (IOMMU) and detours (ACS)."""

from __future__ import annotations

import struct
from collections.abc import Iterable

from tensorspill.doctor.row import Row
from tensorspill.topology.bdf import is_bdf
from tensorspill.topology.discovery.sysfs import Files
from tensorspill.topology.machine import Machine

__all__ = ["translation"]

_MOST = 4096
#: PCI Express: where extended capabilities begin, the number of ACS, the offset of its control
#: register, and the bits that send peers' requests and completions up to the root.
_EXTENDED = 0x100
_ACS = 0x000D
_CONTROL = 6
_REDIRECT = 0x0C


def translation(files: Files, machine: Machine) -> Row:
    """Look at whether DMA from drive to GPU goes the short way."""
    iommu, translated = _iommu(files)
    ports = {bridge.name for one in machine.gpus for bridge in machine.ancestors(one)}
    redirecting, unread = _redirecting(files, sorted(filter(is_bdf, ports)))
    said = [iommu]
    if redirecting:
        said.append(f"ACS redirects at {', '.join(redirecting[:4])}")
        if len(redirecting) > 4:
            said[-1] += f" and {len(redirecting) - 4} more"
    elif unread:
        said.append(f"ACS of {unread} bridges can't be read (that takes an administrator)")
    elif ports:
        said.append("no ACS redirects above the GPUs")
    if redirecting or translated:
        remedy = (
            "Turn off ACS in the firmware (or by setpci on these bridges), and the IOMMU: "
            "iommu=off, or iommu=pt"
        )
        return Row("", "no", "; ".join(said), remedy)
    return Row("", "unknown" if unread or translated is None else "ok", "; ".join(said))


def _iommu(files: Files) -> tuple[str, bool | None]:
    """Return what the IOMMU does, and whether it translates what the devices ask for."""
    if not files.names("sys/class/iommu") and not files.names("sys/kernel/iommu_groups"):
        if not files.exists("sys/class"):
            return "/sys/class can't be read", None
        return "no IOMMU in use", False
    groups = files.names("sys/kernel/iommu_groups")
    texts = (files.text(f"sys/kernel/iommu_groups/{group}/type")[0] for group in groups)
    kinds = sorted({kind for kind in texts if kind})
    if not kinds:
        return "an IOMMU is in use", None
    return f"IOMMU: {', '.join(kinds)}", any(kind.startswith("DMA") for kind in kinds)


def _redirecting(files: Files, names: Iterable[str]) -> tuple[list[str], int]:
    """Return the bridges whose ACS redirects, and how many can't be read."""
    found, unread = [], 0
    for name in names:
        config, _ = files.data(f"sys/bus/pci/devices/{name}/config", _MOST)
        if config is None or len(config) <= _EXTENDED:
            unread += 1
        elif _acs_control(config) & _REDIRECT:
            found.append(name)
    return found, unread


def _acs_control(config: bytes) -> int:
    """Return the ACS control register of a device's configuration space; 0 if it has none."""
    at, seen = _EXTENDED, set[int]()
    while _EXTENDED <= at <= len(config) - 8 and at not in seen:
        seen.add(at)
        (header,) = struct.unpack_from("<I", config, at)
        if header & 0xFFFF == _ACS:
            return int(struct.unpack_from("<H", config, at + _CONTROL)[0])
        at = header >> 20
    return 0
