"""Whether GPUDirect Storage works between a folder's file system and a GPU, and how that is known.

What is cheap to look at comes first; what is left is tried on a file of the folder by
`tensorspill.gds.probe`. The answer is remembered for each file system, GPU and setting, in this
process only: another one may be in a container with other devices.
"""

from __future__ import annotations

import errno
import importlib.metadata
import logging
import os
import re
import tempfile
import threading
from dataclasses import dataclass, replace

from tensorspill.gds import cufile_json, probe
from tensorspill.gds.failures import decode
from tensorspill.gds.probe import Report
from tensorspill.pool.cuda import driver

__all__ = ["OLDEST_KVIKIO", "Evidence", "find", "forget", "missing"]

log = logging.getLogger(__name__)

OLDEST_KVIKIO = (25, 10)

#: The packages that bring the module `kvikio`.
_PACKAGES = ("kvikio-cu13", "kvikio-cu12", "kvikio")

#: Errors of the probe's own file, which say nothing about GPUDirect Storage.
_NO_PLACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES})


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of GPUDirect Storage between a file system and a GPU.

    Attributes
    ----------
    works : bool
        Whether bytes moved straight between the drive and the GPU.
    usable : bool
        Whether kvikio can move bytes at all, through host memory if need be.
    why : str
        Both in one line.
    remedy : str
        What the user can do to have it; may be empty.
    route : str
        "nvidia-fs", "P2PDMA" or "compat".
    streams : bool
        Whether a CUDA stream can run operations.
    lasting : bool
        Whether it is worth remembering.
    report : Report
        What the probe said.
    """

    works: bool
    usable: bool
    why: str
    remedy: str = ""
    route: str = "compat"
    streams: bool = False
    lasting: bool = True
    report: Report = Report()  # noqa: RUF009 - frozen


_lock = threading.Lock()
_remembered: dict[tuple[object, ...], Evidence] = {}


def find(folder: str | os.PathLike[str], device: int, limit: float = probe.LIMIT) -> Evidence:
    """Return what is known, after trying it if that was not done yet.

    Parameters
    ----------
    folder : str or path
        A file of its own is written there and removed again.
    device : int
        Number of the GPU.
    limit : float
        Seconds that the try may take.
    """
    lacking = missing()
    if lacking is not None:
        return lacking
    folder = os.path.abspath(os.fspath(folder))
    try:
        key = (
            os.stat(folder).st_dev,
            device,
            os.environ.get("KVIKIO_COMPAT_MODE"),
            os.environ.get(cufile_json.VARIABLE),
        )
    except OSError as error:
        return Evidence(False, False, f"no GPUDirect Storage: {error.strerror}", lasting=False)
    with _lock:
        known = _remembered.get(key)
        if known is None:
            known = _try(folder, device, limit)
            log.info("%s and cuda:%d: %s", folder, device, known.why)
            if known.lasting:
                _remembered[key] = known
    return known


def forget() -> None:
    """Have the next `find` try again, as after a change of the node."""
    with _lock:
        _remembered.clear()


def missing() -> Evidence | None:
    """Return what rules the GDS engine out without trying, or None; starts no driver if it can."""
    version = _kvikio_version()
    if version is None:
        extra = "Install the extra of your CUDA release, such as tensorspill[cu13]"
        return _no("kvikio is not installed", extra)
    if version < OLDEST_KVIKIO:
        needed = ".".join(map(str, OLDEST_KVIKIO))
        found = ".".join(map(str, version))
        return _no(f"kvikio {found} is too old", f"Install kvikio {needed} or newer")
    if why := driver.why_not():
        return _no(f"{why[:1].lower()}{why[1:]}", "See tensorspill doctor")
    configuration = cufile_json.read()
    if configuration.problem:
        return _no(
            f"libcufile can't read {configuration.path}: {configuration.problem}",
            f"Correct the file, or unset {cufile_json.VARIABLE}",
        )
    return None


def _no(why: str, remedy: str) -> Evidence:
    return Evidence(False, False, f"no GPUDirect Storage: {why}", remedy, lasting=False)


def _kvikio_version() -> tuple[int, ...] | None:
    """Return year and month of the kvikio that would be imported, without importing it."""
    for name in _PACKAGES:
        try:
            text = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return tuple(int(part) for part in re.findall(r"\d+", text)[:2])
    return None


def _try(folder: str, device: int, limit: float) -> Evidence:
    try:
        with tempfile.NamedTemporaryFile(prefix=".tensorspill-probe-", dir=folder) as file:
            return _judge(probe.run(file.name, device, limit))
    except OSError as error:
        # Nothing can be written, but what is here can be read.
        judged = _judge(probe.run("", device, limit))
        why = f"no GPUDirect Storage: no file could be written to try it ({error.strerror})"
        return replace(judged, works=False, why=why, lasting=False)


def _judge(report: Report) -> Evidence:
    """Say what a probe's report means."""
    if report.failure:
        return _judge_failure(report)
    if report.get("mode", "compat"):
        return Evidence(False, True, f"no GPUDirect Storage: {_why_compat()}", report=report)
    route, how = _route(report)
    library = f"libcufile {report.get('cufile', 'library')}"
    if route == "compat":
        remedy = "Load nvidia-fs, or set use_pci_p2pdma in cufile.json"
        why = f"no GPUDirect Storage: {library} moves the bytes through host memory, {how}"
        return Evidence(False, True, why, remedy, report=report)
    streams = report.has("streams") and report.get("streams", "error") is None
    why = f"GPUDirect Storage works: {library} through {route}, {how}"
    return Evidence(True, True, why, route=route, streams=streams, report=report)


def _judge_failure(report: Report) -> Evidence:
    failure = decode(RuntimeError(report.failure))
    remedy = failure.code.remedy if failure.code else ""
    if report.hung and not os.path.exists("/proc/modules"):
        remedy = "libcufile waits for ever where there is no /proc/modules"
    # Without cuFile, kvikio moves the bytes itself, unless it was told not to.
    usable = report.has("gpu") and not report.hung and report.get("kvikio", "mode") != "off"
    return Evidence(
        False,
        usable or (report.has("file") and failure.errno in _NO_PLACE),
        f"no GPUDirect Storage: {failure.text}",
        remedy,
        lasting=failure.errno not in _NO_PLACE,
        report=report,
    )


def _route(report: Report) -> tuple[str, str]:
    """Return which way the bytes took, and how that is known."""
    counted = report.steps.get("statistics", {})
    for name, route in (("p2p", "P2PDMA"), ("nvfs", "nvidia-fs"), ("posix", "compat")):
        if counted.get(name):
            return route, "by its own statistics"
    version = report.get("cufile", "nvidia_fs")
    if version not in (None, "0.0"):
        return "nvidia-fs", f"whose version is {version}"
    if cufile_json.read().properties.get("use_pci_p2pdma") is True:
        return "P2PDMA", "as cufile.json asks for"
    return "compat", "since nvidia-fs is not loaded"


def _why_compat() -> str:
    """Return why kvikio leaves cuFile alone: these are all the reasons that it has."""
    if os.environ.get("KVIKIO_COMPAT_MODE", "").strip().lower() in ("on", "true", "yes", "1"):
        return "KVIKIO_COMPAT_MODE turns it off"
    if "icrosoft" in os.uname().release:
        return "this is the Windows Subsystem for Linux"
    if not os.path.isdir("/run/udev"):
        return "there is no /run/udev here, as in containers"
    return "libcufile can't be loaded"
