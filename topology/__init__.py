"""Machine topology: which rank sits near which GPU, NIC, drive and socket.

This sub-package stands alone: of tensorspill it imports only the errors.
"""

from __future__ import annotations

from tensorspill.topology.discovery import discover
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
    "Bridge",
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
    "discover",
]
