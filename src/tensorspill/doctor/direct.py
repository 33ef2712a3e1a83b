"""GPUDirect Storage: kvikio, cuFile, its configuration, and the two routes past host memory."""

from __future__ import annotations

import importlib.metadata
import os
import re

from tensorspill.doctor.children import Answer
from tensorspill.doctor.gpus import VERSION
from tensorspill.doctor.row import Row
from tensorspill.gds import cufile_json
from tensorspill.gds.failures import decode
from tensorspill.topology.discovery.sysfs import Files

__all__ = ["configuration", "cufile", "kvikio", "route"]

_EXTRA = "Install the extra of your CUDA release, such as tensorspill[cu13]"
_NOT_HERE = "a tree of another machine does not say"

#: What P2PDMA of the upstream kernel needs.
_KERNEL = (6, 2)
_MODULES = (565, 47)
_ROUTES = (
    "Load nvidia-fs; or use P2PDMA: kernel 6.2, open kernel modules 565.47, use_pci_p2pdma in "
    "cufile.json, nvme_core multipath=N, and NVreg_RegistryDwords="
    '"RMForceStaticBar1=1;RmForceDisableIomapWC=1"'
)


def kvikio(asked: Answer, here: bool) -> Row:
    """Look at the Python package that cuFile is used through."""
    if not here:
        return Row("", "unknown", _NOT_HERE)
    version = _installed()
    if version is None:
        return Row("", "no", "not installed", _EXTRA)
    if step := asked.get("steps", {}).get("kvikio"):
        return Row("", "ok", f"{step['version']}, compatibility mode {step['mode']}")
    if "too old" in asked.get("why", ""):
        return Row("", "no", _plain(asked["why"]), asked["remedy"])
    if asked.get("failure"):
        return Row("", "no", f"{version}: {asked['failure']}", asked["remedy"] or _EXTRA)
    return Row("", "unknown", f"{version}, not tried: {_untried(asked)}")


def _installed() -> str | None:
    for name in ("kvikio-cu13", "kvikio-cu12", "kvikio"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cufile(asked: Answer) -> Row:
    """Look at what libcufile says when it moves bytes."""
    if "why" not in asked:
        return Row("", "unknown", f"not tried: {_untried(asked)}")
    steps, why = asked["steps"], _plain(asked["why"])
    version = steps.get("cufile", {}).get("library")
    said = f"libcufile {version}" if version else "libcufile"
    if asked["works"]:
        streams = "with" if asked["streams"] else "without"
        return Row("", "ok", f"{said}, {streams} operations in CUDA streams")
    if asked["hung"]:
        return Row("", "no", f"{said}: {asked['failure']}", asked["remedy"])
    if asked["failure"]:
        failure = decode(RuntimeError(asked["failure"]))
        remedy = failure.code.remedy if failure.code else asked["remedy"]
        return Row("", "no", f"{said}: {failure.code or failure.text}", remedy)
    if steps:
        return Row("", "no", why if why.startswith(said) else f"{said}: {why}", asked["remedy"])
    return Row("", "unknown", f"not tried: {why}")


def configuration(files: Files, here: bool) -> Row:
    """Look at cufile.json; libcufile does without one, but has no stream operations then."""
    if here:
        found = cufile_json.read()
    else:
        path = os.path.join(files.root, cufile_json.DEFAULT.lstrip("/"))
        if not os.path.exists(path):
            return Row("", "unknown", f"no {path}")
        found = cufile_json.read({cufile_json.VARIABLE: path})
    if found.problem:
        remedy = f"Correct the file, or unset {cufile_json.VARIABLE}"
        return Row("", "no", f"{found.path}: {found.problem}", remedy)
    if not found.path:
        said = f"no {cufile_json.DEFAULT}: defaults, and no operations in CUDA streams"
        return Row("", "no", said, "Copy NVIDIA's own from the folder gds of the CUDA toolkit")
    names = ("use_pci_p2pdma", "allow_compat_mode", "max_device_pinned_mem_size_kb")
    set_ = [f"{n} {found.properties[n]}" for n in names if n in found.properties]
    return Row("", "ok", f"{found.path}{': ' if set_ else ''}{', '.join(set_)}")


def route(files: Files, asked: Answer, here: bool) -> Row:
    """Look for a way between drives and GPUs past host memory: nvidia-fs, or P2PDMA."""
    if asked.get("works"):
        return Row("", "ok", f"bytes took {asked['route']}")
    version, _ = files.text("proc/driver/nvidia-fs/version")
    version = version or files.text("sys/module/nvidia_fs/version")[0]
    if version:
        said = f"nvidia-fs {' '.join(version.split())[:60]}"
        if here and not files.exists("dev/nvidia-fs0"):
            remedy = "Pass /dev/nvidia-fs* into the container"
            return Row("", "no", f"{said}, without its device files", remedy)
        return Row("", "ok", said)
    lacking = _p2pdma_lacks(files, here)
    if not lacking:
        return Row("", "ok", "P2PDMA: kernel, modules and settings are as it needs them")
    return Row("", "no", f"no nvidia-fs; for P2PDMA: {'; '.join(lacking)}", _ROUTES)


def _p2pdma_lacks(files: Files, here: bool) -> list[str]:
    lacking = []
    release, why = files.text("proc/sys/kernel/osrelease")
    numbers = tuple(int(part) for part in re.findall(r"\d+", release or "")[:2])
    if len(numbers) < 2 or numbers < _KERNEL:
        lacking.append(f"kernel {release}" if release else why)
    text, _ = files.text(VERSION)
    module = re.search(r"(Open )?Kernel Module.*?(\d+)\.(\d+)", text or "", re.DOTALL)
    if module is None:
        lacking.append("no NVIDIA kernel module")
    elif not module[1]:
        lacking.append("the kernel modules are not the open ones")
    elif (int(module[2]), int(module[3])) < _MODULES:
        lacking.append(f"kernel modules {module[2]}.{module[3]}")
    parameters, _ = files.text("proc/driver/nvidia/params")
    if module is not None and "RMForceStaticBar1=1" not in (parameters or ""):
        lacking.append("RMForceStaticBar1 is not set")
    if files.text("sys/module/nvme_core/parameters/multipath")[0] == "Y":
        lacking.append("nvme_core has multipath")
    if here and cufile_json.read().properties.get("use_pci_p2pdma") is not True:
        lacking.append("use_pci_p2pdma is not set")
    return lacking


def _untried(asked: Answer) -> str:
    return _plain(str(asked.get("why") or asked.get("problem") or _NOT_HERE))


def _plain(why: str) -> str:
    return why.removeprefix("no GPUDirect Storage: ")
