"""Finding out what this machine consists of."""

from __future__ import annotations

import socket

from tensorspill.topology.machine import Machine

__all__ = ["discover"]


def discover(root: str = "/") -> Machine:
    """Return what this machine consists of; never raises.

    Parameters
    ----------
    root : str
        Folder that holds ``sys`` and ``proc``.
    """
    return Machine(hostname=socket.gethostname(), source=f"sysfs of {root}")
