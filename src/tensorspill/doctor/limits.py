"""Limits of the operating system: AIO requests, locked memory, huge pages."""

from __future__ import annotations

import re

from tensorspill.doctor.children import Answer
from tensorspill.doctor.row import Row
from tensorspill.pool.sizes import format_bytes
from tensorspill.topology.discovery.sysfs import Files

__all__ = ["aio_limits", "huge_pages", "memlock"]

#: Operations that an engine has under way; see `tensorspill.host_fallback.AioOptions`.
_DEPTH = 32
_ENOUGH_LOCKED = 64 << 20
_LOCKED = re.compile(r"^Max locked memory +(\S+)", re.MULTILINE)
_THP = "sys/kernel/mm/transparent_hugepage/enabled"


def aio_limits(files: Files, tried: Answer) -> Row:
    """Look at how many requests of Linux AIO are free, and whether a process gets any."""
    texts = {name: files.text(f"proc/sys/fs/aio-{name}") for name in ("nr", "max-nr")}
    numbers = {name: int(text) for name, (text, _) in texts.items() if text and text.isdecimal()}
    depth = tried.get("aio_depth")
    said = "fs.aio-max-nr can't be read"
    if len(numbers) == 2:
        free = numbers["max-nr"] - numbers["nr"]
        said = f"{free} of {numbers['max-nr']} requests are free"
        if free < _DEPTH and depth != _DEPTH:
            return Row("", "no", said, "Raise the limit: sysctl fs.aio-max-nr=1048576")
    if depth is None:
        return Row("", "ok" if len(numbers) == 2 else "unknown", said)
    if depth < _DEPTH:
        remedy = "Allow io_setup, io_submit and io_getevents (seccomp), or raise fs.aio-max-nr"
        return Row("", "no", f"{said}; io_setup gave a depth of {depth}", remedy)
    return Row("", "ok", f"{said}; io_setup works")


def memlock(files: Files) -> Row:
    """Look at how much memory this process may lock by itself."""
    text, why = files.text("proc/self/limits")
    match = _LOCKED.search(text or "")
    if match is None:
        return Row("", "unknown", why or "/proc/self/limits names no limit")
    note = "the CUDA driver's page-locking does not count"
    if match[1] == "unlimited":
        return Row("", "ok", f"unlimited; {note}")
    if not match[1].isdecimal():
        return Row("", "unknown", f"/proc/self/limits says {match[1][:20]!r}")
    size = int(match[1])
    if size < _ENOUGH_LOCKED:
        said = f"{format_bytes(size)}, too little for RDMA file systems; {note}"
        return Row("", "no", said, "ulimit -l unlimited, or memlock in /etc/security/limits.conf")
    return Row("", "ok", f"{format_bytes(size)}; {note}")


def huge_pages(files: Files) -> Row:
    """Look at whether staging memory and pools may be in huge pages."""
    text, why = files.text(_THP)
    match = re.search(r"\[(\w+)\]", text or "")
    if match is None:
        return Row("", "unknown", why or f"/{_THP} says {(text or '')[:40]!r}")
    if match[1] == "never":
        return Row(
            "", "no", "transparent huge pages: never", f"echo madvise > /{_THP} (as administrator)"
        )
    return Row("", "ok", f"transparent huge pages: {match[1]}")
