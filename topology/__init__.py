"""Machine topology: which rank sits near which GPU, NIC, drive and socket.

This sub-package stands alone: of tensorspill it imports only the errors.
"""

from __future__ import annotations

from tensorspill.topology.affinity import Affinity, affinities
from tensorspill.topology.binding import bind_process, bind_thread, bound
from tensorspill.topology.discovery import Storage, device_of, discover
from tensorspill.topology.distances import Distance, distance, nearest
from tensorspill.topology.machine import (
    Bridge,
    Drive,
    Gpu,
    Machine,
    Mig,
    Mount,
    Nic,
    NumaNode,
    NvLink,
    Socket,
    Stack,
)

__all__ = [
    "Affinity",
    "Bridge",
    "Distance",
    "Drive",
    "Gpu",
    "Machine",
    "Mig",
    "Mount",
    "Nic",
    "NumaNode",
    "NvLink",
    "Socket",
    "Stack",
    "Storage",
    "affinities",
    "bind_process",
    "bind_thread",
    "bound",
    "device_of",
    "discover",
    "distance",
    "nearest",
]
