"""Ceilings: what no transfer can be faster than, as far as it is known or was measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tensorspill.topology.discovery.paths import Storage
from tensorspill.topology.machine import Bridge, Drive, Gpu, Machine

__all__ = ["Ceiling", "device_ceilings", "measured", "per_cent", "tightest"]

#: Payload of a PCIe packet and what surrounds it, in bytes: the payload that most root ports
#: agree on, and header, sequence number, checksum and framing.
_PAYLOAD, _AROUND = 256, 24
_PROTOCOL = _PAYLOAD / (_PAYLOAD + _AROUND)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """One limit.

    Attributes
    ----------
    name : str
        Such as "PCIe link of nvme0n1".
    gbps : float or None
        In GB/s (decimal); None if it is not known or was not measured.
    why : str
        Where the figure comes from, or why there is none.
    """

    name: str
    gbps: float | None
    why: str


def device_ceilings(
    machine: Machine, storage: Storage, direction: str, gpu: Gpu | None = None
) -> tuple[Ceiling, ...]:
    """Return the limits that the machine's description gives.

    Parameters
    ----------
    machine : Machine
    storage : Storage
        Below the folder, see `tensorspill.topology.device_of`.
    direction : {"read", "write"}
    gpu : Gpu, optional
        Whose memory takes part.
    """
    drives = [drive for drive in machine.drives if drive.name in storage.drives]
    found = []
    if drives:
        found = [_links(machine, drives), _rated(drives, direction)]
    else:
        why = storage.why("device") or "the drive below is not known"
        found = [Ceiling("PCIe link of the drive", None, why)]
    if gpu is not None:
        name = f"PCIe link of GPU {gpu.bdf or ''}".strip()
        found.append(_link_ceiling(name, _slowest_link(machine, gpu), gpu.why("link_mbps")))
    return tuple(found)


def measured(name: str, gbps: float | None, why: str) -> Ceiling:
    """Return the limit that a measurement gave; None where there was none."""
    return Ceiling(name, gbps if gbps is None or gbps > 0 else None, why)


def tightest(ceilings: Iterable[Ceiling]) -> Ceiling | None:
    """Return the lowest of the known limits, or None."""
    known = [ceiling for ceiling in ceilings if ceiling.gbps is not None]
    return min(known, key=lambda ceiling: ceiling.gbps or 0.0, default=None)


def per_cent(gbps: float | None, ceiling: Ceiling | None) -> float | None:
    """Return a rate in per cent of a limit, or None if one of them is not known."""
    if gbps is None or ceiling is None or not ceiling.gbps:
        return None
    return 100.0 * gbps / ceiling.gbps


def _links(machine: Machine, drives: list[Drive]) -> Ceiling:
    """Add up the links of the drives that share the bytes; one that is not known spoils the sum."""
    name = f"PCIe link of {_names(drives)}"
    rates = [_slowest_link(machine, drive) for drive in drives]
    why = next((d.why("link_mbps") for d, r in zip(drives, rates, strict=True) if r is None), "")
    total = sum(rate or 0 for rate in rates) if None not in rates else None
    return _link_ceiling(name, total, why)


def _link_ceiling(name: str, mbps: int | None, why: str) -> Ceiling:
    if not mbps:
        return Ceiling(name, None, f"not known: {why}" if why else "not known")
    how = f"{mbps / 1e3:.2f} GB/s by width and speed, less {1 - _PROTOCOL:.0%} for packets' headers"
    return Ceiling(name, mbps * _PROTOCOL / 1e3, how)


def _slowest_link(machine: Machine, device: Drive | Gpu) -> int | None:
    """Return the rate of the slowest link from a device to its host bridge, in MB/s."""
    if device.link_mbps is None:
        return None
    above: tuple[Bridge, ...] = machine.ancestors(device)
    return min([device.link_mbps, *(b.link_mbps for b in above if b.link_mbps)])


def _rated(drives: list[Drive], direction: str) -> Ceiling:
    name = f"{_names(drives)}'s own {direction} rate"
    rates = [drive.read_mbps if direction == "read" else drive.write_mbps for drive in drives]
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates):
        return Ceiling(name, None, "not known: nothing on this machine says it")
    return Ceiling(name, sum(known) / 1e3, "as given for the drive")


def _names(drives: list[Drive]) -> str:
    return " + ".join(drive.name for drive in drives)
