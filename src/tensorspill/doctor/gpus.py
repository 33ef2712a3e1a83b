"""The NVIDIA driver, the GPUs, and how much of their memory a drive can reach (BAR1)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tensorspill.doctor.children import Answer
from tensorspill.doctor.row import Row
from tensorspill.gds.failures import decode
from tensorspill.pool.sizes import format_bytes
from tensorspill.topology.discovery.sysfs import Files
from tensorspill.topology.machine import Gpu, Machine

__all__ = ["VERSION", "bar1", "driver", "gpu"]

VERSION = "proc/driver/nvidia/version"
_INSTALL = "Install NVIDIA's driver; in a container, pass the GPU through (--gpus all)"
#: What GPUs without a large BAR1 have.
_SMALL = 256 << 20


def driver(files: Files, asked: Answer) -> Row:
    """Look at the kernel's module and at the CUDA driver."""
    text, why = files.text(VERSION)
    module = text.splitlines()[0].removeprefix("NVRM version:").strip() if text else ""
    if "cuda" in asked:
        number = int(asked["cuda"])
        said = f"CUDA {number // 1000}.{number % 1000 // 10}"
        return Row("", "ok", f"{said}; {module}" if module else f"{said}; {why}")
    if asked.get("hung"):
        return Row("", "no", f"cuInit hangs: {asked['problem']}", "See the kernel's log for NVRM")
    if "problem" in asked:
        said = str(asked["problem"])
        if "cuda-python" in said:
            extra = "Install the extra of your CUDA release, such as tensorspill[cu13]"
            return Row("", "unknown", f"{module or why}; {said}", extra)
        remedy = "Install the driver's user libraries, of the same release" if module else _INSTALL
        return Row("", "no", f"{said}; {module or why}", remedy)
    if module:
        return Row("", "ok", module)
    return Row("", "no", why or f"/{VERSION} is empty", _INSTALL)


def gpu(machine: Machine, asked: Answer) -> Row:
    """Look at which GPUs there are, and which of them CUDA shows."""
    known = [one for one in machine.gpus if one.index is not None]
    if shown := asked.get("gpus"):
        said = _counted([str(one.get("name", "GPU")) for one in shown])
        hidden = len(machine.gpus) - len(shown)
        more = f"; {hidden} more are not visible to this process" if hidden > 0 else ""
        return Row("", "ok", f"{said}{more}")
    names = _counted([one.name or "GPU of unknown name" for one in machine.gpus])
    if not machine.gpus:
        remedy = "Use the host path; GPUDirect Storage needs an NVIDIA GPU"
        return Row("", "no", "no GPU on the PCIe bus", remedy)
    if "problem" in asked:
        return Row("", "no", f"{names}, which CUDA does not show: {asked['problem']}", _INSTALL)
    if not known:
        return Row("", "no", f"{names}, whose device files are not in this container", _INSTALL)
    return Row("", "ok", names)


def bar1(files: Files, machine: Machine, asked: Answer, tried: Answer) -> Row:
    """Look at how much memory of the GPUs can be registered for drives at a time.

    `tried` is what GPUDirect Storage did, registering included.
    """
    if problem := tried.get("steps", {}).get("register", {}).get("error"):
        failure = decode(RuntimeError(problem))
        remedy = failure.code.remedy if failure.code else ""
        return Row("", "no", f"registering 1 MiB failed: {failure.code or failure.text}", remedy)
    sizes: dict[str, tuple[int, int | None]] = {}
    for one in asked.get("gpus", ()):
        if one.get("bar1"):
            sizes[f"cuda:{one['index']}"] = one["bar1"], one.get("memory")
    if not sizes:
        sizes = _from_sysfs(files, machine.gpus)
    if not sizes:
        found = machine.gpus or asked.get("gpus")
        why = "neither NVML nor sysfs says" if found else "no GPU"
        return Row("", "unknown", why)
    # One line for all that are alike.
    said = _counted([_covered(*size) for size in sizes.values()])
    if min(size for size, _ in sizes.values()) <= _SMALL:
        remedy = (
            "Turn on Above 4G Decoding and Resizable BAR in the firmware; until then register "
            "little (option registered_bytes)"
        )
        return Row("", "no", said, remedy)
    return Row("", "ok", said)


def _covered(size: int, memory: int | None) -> str:
    if memory is None:
        return format_bytes(size)
    if size >= memory:
        return f"{format_bytes(size)}, which covers all of the memory"
    return f"{format_bytes(size)} for {format_bytes(memory)} of memory"


def _from_sysfs(files: Files, gpus: Sequence[Gpu]) -> dict[str, tuple[int, int | None]]:
    """Take the second region of each GPU, which is what a drive reaches."""
    found: dict[str, tuple[int, int | None]] = {}
    for one in gpus:
        text, _ = files.text(f"sys/bus/pci/devices/{one.bdf}/resource")
        lines = (text or "").splitlines()
        try:
            start, end = (int(number, 16) for number in lines[1].split()[:2])
        except (IndexError, ValueError):
            continue
        if end > start:
            found[one.bdf or ""] = end - start + 1, one.memory_bytes
    return found


def _counted(texts: Sequence[str]) -> str:
    """Return alike texts once each, with their number."""
    counts = Counter(texts)
    return "; ".join(text if n == 1 else f"{n} x {text}" for text, n in counts.items())
