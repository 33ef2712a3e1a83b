"""A folder to measure in: checked for room, and gone afterwards, however the run ends."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tensorspill.errors import NoSpaceError
from tensorspill.pool.sizes import format_bytes

__all__ = ["working_folder"]

_ENDING = (signal.SIGTERM, signal.SIGHUP)

#: Left free on the file system: one that is full is a slow one.
_SPARE = 1 << 30


@contextmanager
def working_folder(parent: str | os.PathLike[str], needed: int) -> Iterator[Path]:
    """Make a folder inside `parent` and remove it at the end.

    SIGTERM and SIGHUP end the run as Ctrl-C does, so that the folder goes then as well.

    Raises
    ------
    NoSpaceError
        There are not `needed` bytes free.
    """
    room = os.statvfs(parent)
    free = room.f_bavail * room.f_frsize
    if free < needed + _SPARE:
        raise NoSpaceError(
            f"{parent} has {format_bytes(free)} free, the run needs {format_bytes(needed)} "
            f"and leaves {format_bytes(_SPARE)}"
        )
    before = {number: signal.signal(number, _end) for number in _ENDING}
    folder = Path(tempfile.mkdtemp(prefix="tensorspill-bench-", dir=parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
