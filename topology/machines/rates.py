"""From a link's rate back to what the kernel and NCCL call it."""

from __future__ import annotations

from tensorspill.errors import UnsupportedError
from tensorspill.topology.discovery.sysfs import link_mbps

__all__ = ["link_of_rate"]

_SPEEDS = ("2.5", "5.0", "8.0", "16.0", "32.0", "64.0", "128.0")
_LANES = (1, 2, 4, 8, 16, 32)


def link_of_rate(rate: int) -> tuple[str, str]:
    """Return the speed and width of a link that carries `rate` MB/s; the widest that does.

    Raises
    ------
    UnsupportedError
        No link carries this much.
    """
    for speed in _SPEEDS:
        for lanes in _LANES:
            if link_mbps(text := f"{speed} GT/s PCIe", str(lanes)) == rate:
                return text, str(lanes)
    raise UnsupportedError(f"No PCIe link carries {rate} MB/s")
