"""Where the demonstration keeps its spill file."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tensorspill.errors import BrokenError

__all__ = ["Mount", "find_mount", "temporary_folder"]

_IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs", "hugetlbfs"))
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system.

    Attributes
    ----------
    source, kind : str
        Such as "/dev/nvme0n1p2" and "ext4"; "?" if they can't be found out.
    """

    source: str
    kind: str

    @property
    def in_memory(self) -> bool:
        """Whether its files are in memory, not on a drive."""
        return self.kind in _IN_MEMORY


def find_mount(folder: Path) -> Mount:
    """Return the file system that an existing folder is on."""
    number = os.stat(folder).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    best, found = -1, Mount("?", "?")
    path = os.path.realpath(folder)
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        fields, _, tail = line.partition(" - ")
        device, point = fields.split()[2], _unescaped(fields.split()[4])
        kind, source = tail.split()[:2]
        # btrfs and overlays give files a device number of their own: go by the path then.
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        rank = len(point) + (1 << 20 if device == wanted else 0)
        if inside and rank >= best:  # a later mount hides an earlier one
            best, found = rank, Mount(_unescaped(source), kind)
    return found


def _unescaped(text: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), text)


@contextmanager
def temporary_folder(folder: Path | None) -> Iterator[Path]:
    """Make a new folder in `folder`, or in the best place for one, and remove it at the end.

    The best place is the first that is on a drive and may be written to: the user's cache, the
    current folder, the place for temporary files; if none is, the last of these.

    Raises
    ------
    BrokenError
        No folder can be made there.
    """
    parent = folder or _best_place()
    missing = not parent.exists()
    try:
        parent.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(
            prefix="tensorspill-demo-", dir=parent, ignore_cleanup_errors=True
        )
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't make a folder", path=parent) from error
    try:
        with made as path:
            yield Path(path)
    finally:
        if missing:
            with suppress(OSError):  # others use it meanwhile
                parent.rmdir()


def _best_place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [Path(cache) / "tensorspill", Path.cwd(), Path(tempfile.gettempdir())]
    if not os.path.isabs(cache):  # there is no home
        del places[0]
    return next((place for place in places if _is_on_drive(place)), places[-1])


def _is_on_drive(place: Path) -> bool:
    existing = next(path for path in (place, *place.parents) if path.exists())
    return os.access(existing, os.W_OK | os.X_OK) and not find_mount(existing).in_memory
