"""Asks the CUDA driver, in a process of its own: cuInit may hang, and nothing else has to be torch.

Says the driver's CUDA version and, for each GPU, name, PCI address, bytes of memory and of BAR1,
and whether it takes part in DMA between devices.
"""

from __future__ import annotations

import ctypes
import importlib
from typing import Any

from tensorspill.doctor.children import say

__all__ = ["look"]


def look() -> dict[str, Any]:
    """Return what the driver says, or why it says nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        return {"problem": f"libcuda.so.1 can't be loaded: {error}"}
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        return {"problem": f"cuda-python is not installed: {error}"}
    try:
        _call(driver, "cuInit", 0)
        gpus = [_gpu(driver, index) for index in range(_call(driver, "cuDeviceGetCount"))]
        found: dict[str, Any] = {"cuda": _call(driver, "cuDriverGetVersion"), "gpus": gpus}
    except RuntimeError as error:
        return {"problem": str(error)}
    return found | _bars(gpus)


def _gpu(driver: Any, index: int) -> dict[str, Any]:
    device = _call(driver, "cuDeviceGet", index)

    def attribute(name: str) -> int:
        code = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(_call(driver, "cuDeviceGetAttribute", code, device))

    found: dict[str, Any] = {"index": index}
    for key, ask in (
        ("name", lambda: _call(driver, "cuDeviceGetName", 100, device).decode().strip("\0 ")),
        ("memory", lambda: _call(driver, "cuDeviceTotalMem", device)),
        ("bdf", lambda: _call(driver, "cuDeviceGetPCIBusId", 20, device).decode().strip("\0 ")),
        ("rdma", lambda: attribute("GPU_DIRECT_RDMA_SUPPORTED")),
        ("integrated", lambda: attribute("INTEGRATED")),
    ):
        try:
            found[key] = ask()
        except Exception as error:  # an older driver or binding lacks it
            found.setdefault("lacking", []).append(f"{key}: {error}")
    return found


def _bars(gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask NVML how large BAR1 is, and how much of it is free."""
    try:
        nvml = importlib.import_module("cuda.bindings.nvml")
        nvml.init_v2()
    except Exception as error:
        return {"nvml": f"{type(error).__name__}: {error}"}
    for gpu in gpus:
        try:
            handle = nvml.device_get_handle_by_pci_bus_id_v2(gpu["bdf"])
            memory = nvml.device_get_bar1_memory_info(handle)
            gpu["bar1"] = int(memory.bar1total)
            gpu["bar1_free"] = int(memory.bar1free)
        except Exception as error:
            gpu.setdefault("lacking", []).append(f"BAR1: {error}")
    return {}


def _call(driver: Any, name: str, *arguments: Any) -> Any:
    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise RuntimeError(f"{name} failed with {getattr(code, 'name', code)}")
    return values[0] if values else None


if __name__ == "__main__":
    say(look())
