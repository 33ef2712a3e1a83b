"""What rows say about where they were measured: the machine, and which tensorspill."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from datetime import UTC, datetime
from pathlib import Path

import tensorspill

__all__ = ["commit", "host", "memory_available", "now"]

_TIMEOUT = 5.0


def host() -> str:
    """Return the machine's name."""
    return socket.gethostname()


def now() -> str:
    """Return the time: ISO 8601, UTC, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


@functools.cache
def commit() -> str:
    """Return tensorspill's version, and the commit of its tree where that is one of git's."""
    version = tensorspill.__version__
    folder = Path(tensorspill.__file__).parent
    # Installed, the nearest tree of git's may be anybody's.
    if not (folder.parents[1] / ".git").exists():
        return version
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired):
        return version
    return f"{version}+{found.stdout.strip()}" if found.returncode == 0 else version


def memory_available() -> int:
    """Return the bytes of memory that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
