"""Which pieces are there: GPU, CuPy, kvikio, Triton, and what tests need; each says why not."""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks.gpu.check import Check

__all__ = ["described", "no_cupy", "no_engine", "no_gpu", "no_kvikio", "no_pytest", "no_triton"]

_PACKAGES = (
    "torch", "triton", "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x", "kvikio-cu13",
    "kvikio-cu12", "cuda-python", "cuda-bindings", "nvidia-cufile", "pytest", "hypothesis",
)  # fmt: skip


def no_gpu(check: Check) -> str | None:
    """Return why torch has no GPU."""
    if check.device.type == "cpu":
        return None if check.scale > 1 else f"torch {torch.__version__} sees no GPU here"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no GPU here"
    return None


def no_engine(check: Check) -> str | None:
    """Return why the engine for GPU memory can't be used."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    if check.device.type == "cpu":
        return None
    from tensorspill.pool.cuda.driver import why_not

    return why_not()


def no_cupy(_: Check) -> str | None:
    """Return why CuPy can't be used."""
    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    try:
        count = importlib.import_module("cupy").cuda.runtime.getDeviceCount()
    except Exception as error:
        return f"CuPy can't be used: {type(error).__name__}: {str(error).splitlines()[0]}"
    return None if count else "CuPy sees no GPU"


def no_kvikio(_: Check) -> str | None:
    """Return why kvikio can't be used."""
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    try:
        importlib.import_module("kvikio.defaults")
    except Exception as error:
        return f"kvikio can't be imported: {type(error).__name__}: {error}"
    return None


def no_triton(check: Check) -> str | None:
    """Return why kernels can't be compiled."""
    from tensorspill.pool.kernels.triton_launch import interpreted, why_not

    if check.device.type == "cpu" and not interpreted():
        return "Triton compiles nothing for a CPU"
    return why_not()


def no_pytest(_: Check) -> str | None:
    """Return why tests can't be run."""
    for name in ("pytest", "hypothesis"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return None


def described(device: torch.device) -> dict[str, Any]:
    """Describe the GPU and the software, without what identifies the machine."""
    found: dict[str, Any] = {"software": {n: v for n in _PACKAGES if (v := _version(n))}}
    if device.type != "cuda":
        return found | {"name": "no GPU"}
    properties = torch.cuda.get_device_properties(device)
    return found | {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "torch_cuda": torch.version.cuda,
        "driver_cuda": _driver(),
        "pcie_mbps": _link(device.index or 0),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _driver() -> int | None:
    try:
        from tensorspill.pool.cuda import driver

        return driver.version()
    except Exception:
        return None


def _link(index: int) -> int | None:
    """Return what the PCIe link of the GPU carries, in MB/s."""
    try:
        from tensorspill.topology import discover

        return discover().gpus[index].link_mbps
    except Exception:
        return None
