"""Limits of this process or of the kernel, lowered for a moment."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

__all__ = ["address_space", "another_user", "file_size_limit", "kernel_setting", "resource_limit"]


@contextlib.contextmanager
def resource_limit(kind: int, soft: int) -> Iterator[None]:
    """Set a soft limit of this process, such as `resource.RLIMIT_NOFILE`."""
    before, hard = resource.getrlimit(kind)
    resource.setrlimit(kind, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(kind, (before, hard))


def file_size_limit(nbytes: int) -> contextlib.AbstractContextManager[None]:
    """Set the soft RLIMIT_FSIZE; writes beyond it fail with EFBIG."""
    return resource_limit(resource.RLIMIT_FSIZE, nbytes)


def address_space(more: int) -> contextlib.AbstractContextManager[None]:
    """Allow this process only `more` bytes of address space than it has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return resource_limit(resource.RLIMIT_AS, pages * resource.getpagesize() + more)


@contextlib.contextmanager
def another_user(uid: int = 65534) -> Iterator[None]:
    """Act as a user without rights, if this process is root's; else change nothing."""
    before = os.geteuid()
    if before == 0:
        os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(before)


@contextlib.contextmanager
def kernel_setting(path: str, value: int) -> Iterator[None]:
    """Change a setting below /proc/sys for a moment; skip where that is not allowed."""
    file = Path("/proc/sys", path)
    before = file.read_text().strip()
    # Another process puts it back when its input ends, so even if this one is killed.
    restore = ["sh", "-c", 'cat >/dev/null; echo "$1" >"$2"', "sh", before, str(file)]
    guard = subprocess.Popen(restore, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        try:
            file.write_text(str(value))
        except OSError as error:
            pytest.skip(f"{file} can't be changed here: {error.strerror}")
        yield
    finally:
        with guard:
            guard.communicate(timeout=30)
