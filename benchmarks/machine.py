"""The machine that figures were measured on, without what identifies it."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling import fio

__all__ = ["Machine", "describe", "memory_available"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What figures depend on.

    Attributes
    ----------
    cpu : str
    cores : int
        That this process may use.
    memory_bytes : int
    kernel : str
    file_system : str
        Type and mount options of the folder's.
    device : str
        The block device below, and its queue.
    free_bytes : int
        Of the folder's file system.
    software : dict of str to str
    load : tuple of float
        Average of the last 1, 5 and 15 minutes: more than about 0.2 means that others run.
    """

    cpu: str
    cores: int
    memory_bytes: int
    kernel: str
    file_system: str
    device: str
    free_bytes: int
    software: dict[str, str]
    load: tuple[float, float, float]

    def lines(self) -> list[str]:
        """Return the description for people."""
        software = ", ".join(f"{name} {number}" for name, number in self.software.items())
        return [
            f"{self.cpu}, {self.cores} cores, {format_bytes(self.memory_bytes)}; {self.kernel}",
            f"{self.file_system} on {self.device}, {format_bytes(self.free_bytes)} free",
            f"{software}; load {' '.join(f'{load:.2f}' for load in self.load)}",
        ]

    def record(self) -> dict[str, Any]:
        """Return the description for JSON."""
        return asdict(self)


def memory_available() -> int:
    """Return the bytes of memory that can be used without swapping."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def describe(folder: str | os.PathLike[str]) -> Machine:
    """Describe the machine and what `folder` lies on."""
    room = os.statvfs(folder)
    return Machine(
        cpu=_cpu(),
        cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        kernel=f"{platform.system()} {platform.release()} {platform.machine()}",
        file_system=_file_system(folder),
        device=_device(folder),
        free_bytes=room.f_bavail * room.f_frsize,
        software={
            "Python": platform.python_version(),
            "torch": version("torch"),
            "numba": version("numba"),
            "fio": (fio.version() or "not installed").removeprefix("fio-"),
        },
        load=os.getloadavg(),
    )


def _cpu() -> str:
    """Return the model, by whichever of its names the architecture has."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "CPU part") and value.strip():
            return value.strip()
    return platform.machine()


def _file_system(folder: str | os.PathLike[str]) -> str:
    """Find the mount of the folder's device; of several, the last one lies on top."""
    device = os.stat(folder).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"
    found = "unknown"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        front, _, back = line.partition(" - ")
        fields = front.split()
        if fields[2] == name:
            found = f"{back.split()[0]} ({fields[5]})"
    return found


def _device(folder: str | os.PathLike[str]) -> str:
    number = os.stat(folder).st_dev
    place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    if not place.exists():
        return "no block device"
    place = place.resolve()
    queue = place / "queue" if (place / "queue").is_dir() else place.parent / "queue"
    model = _text(queue.parent / "device" / "model")
    block = _text(queue / "logical_block_size")
    requests = _text(queue / "nr_requests")
    kind = "rotating" if _text(queue / "rotational") == "1" else "not rotating"
    return (
        f"{place.name}{f' ({model})' if model else ''}: blocks of {block}, queue of {requests}, "
        f"says it is {kind}"
    )


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
