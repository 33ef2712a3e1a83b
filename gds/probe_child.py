"""The probe itself: a script that tries GPUDirect Storage on one file, and may hang or crash.

Run by `tensorspill.gds.probe` in a process of its own, with the file's path and the number of the
GPU. After each step it prints one JSON object in a line, so that the last line tells how far it
came. It imports nothing of tensorspill, which would bring torch: that takes longer than the rest.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

#: Above every threshold under which kvikio goes another way.
NBYTES = 1 << 20


def main(path: str, device: int) -> None:
    """Try one layer after another; a layer that fails ends the probe."""
    import kvikio
    import kvikio.defaults

    kvikio.defaults.set("gds_threshold", 4096)
    mode = kvikio.defaults.get("compat_mode").name.lower()
    _say("kvikio", version=kvikio.__version__, mode=mode)
    memory = _device_memory(device)
    _say("gpu")
    compat = bool(kvikio.defaults.is_compat_mode_preferred())
    _say("mode", compat=compat)
    if not compat:
        _describe_cufile()
    if not path:
        return
    kvikio.defaults.set("compat_mode", kvikio.CompatMode.ON if compat else kvikio.CompatMode.OFF)
    with kvikio.CuFile(path, "r+") as file:
        _say("file")
        if not compat:
            # Not before: libcufile counts once its driver is open.
            _start_statistics()
            _register(memory)
        content = os.urandom(NBYTES)
        memory.fill(content)
        _expect(NBYTES, file.pwrite(memory).get())
        memory.fill(bytes(NBYTES))
        _expect(NBYTES, file.pread(memory).get())
        if memory.content() != content:
            raise RuntimeError("what was read is not what was written")
        _say("transfer")
        if not compat:
            _read_statistics()
            _try_streams(file, memory)


class _Memory:
    """Device memory for kvikio, and its way to and from the host."""

    def __init__(self, address: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (NBYTES,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
            "strides": None,
        }
        self.address = address

    def fill(self, content: bytes) -> None:
        _cuda("cuMemcpyHtoD", self.address, content, NBYTES)

    def content(self) -> bytes:
        content = bytearray(NBYTES)
        _cuda("cuMemcpyDtoH", content, self.address, NBYTES)
        return bytes(content)


def _device_memory(device: int) -> _Memory:
    _cuda("cuInit", 0)
    handle = _cuda("cuDeviceGet", device)
    _cuda("cuCtxSetCurrent", _cuda("cuDevicePrimaryCtxRetain", handle))
    return _Memory(int(_cuda("cuMemAlloc", NBYTES)))


def _cuda(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver

    code, *values = getattr(driver, name)(*arguments)
    if int(code):
        raise RuntimeError(f"{name} failed with {code.name}")
    return values[0] if values else None


def _describe_cufile() -> None:
    from kvikio import cufile_driver

    major, minor = (cufile_driver.get(f"{part}_version") for part in ("major", "minor"))
    library = cufile_driver.libcufile_version()
    pinned = cufile_driver.get("max_pinned_memory_size")
    _say("cufile", nvidia_fs=f"{major}.{minor}", library="{}.{}".format(*library), pinned=pinned)


def _register(memory: _Memory) -> None:
    """Say whether memory can be registered; without, cuFile has buffers of its own."""
    import kvikio

    try:
        kvikio.memory_register(memory)
    except RuntimeError as error:
        _say("register", error=str(error))
    else:
        _say("register", error=None)


def _start_statistics() -> None:
    """Have libcufile count the ways that bytes take, if it is new enough to."""
    try:
        from cuda.bindings import cufile

        cufile.set_stats_level(3)
        cufile.stats_start()
    except Exception as error:
        _say("no statistics", error=repr(error))


def _read_statistics() -> None:
    try:
        from cuda.bindings import cufile

        record = cufile.StatsLevel3()
        cufile.get_stats_l3(record.ptr)
        gpus = record.per_gpu_stats
        counts = {
            route: int(sum(getattr(gpus, f"n_{route}_reads") + getattr(gpus, f"n_{route}_writes")))
            for route in ("p2p", "nvfs", "posix")
        }
    except Exception as error:
        _say("no statistics", error=repr(error))
    else:
        _say("statistics", **counts)


def _try_streams(file: Any, memory: _Memory) -> None:
    """Say whether a stream can run operations."""
    import kvikio

    try:
        stream = int(_cuda("cuStreamCreate", 1))
        kvikio.stream_register(stream, 7)
        _expect(NBYTES, file.raw_write_async(memory, stream).check_bytes_done())
        _expect(NBYTES, file.raw_read_async(memory, stream).check_bytes_done())
    except RuntimeError as error:
        _say("streams", error=str(error))
    else:
        _say("streams", error=None)


def _expect(asked: int, moved: int) -> None:
    if moved != asked:
        raise RuntimeError(f"{moved} of {asked} bytes were moved")


def _say(step: str, **details: Any) -> None:
    sys.stdout.write(json.dumps({"step": step, **details}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1], int(sys.argv[2]))
    except Exception as error:
        _say("failed", error=str(error), kind=type(error).__name__)
    else:
        _say("done")
    finally:
        # libcufile is known to crash at the end of a process that counted.
        os._exit(0)
