"""Limits of this process, lowered for a moment."""

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Set the soft RLIMIT_FSIZE; writes beyond it fail with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


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
