"""Reading sysfs and procfs: nothing raises, and what can't be read says why.

All paths are relative to a root, so that a copied or generated tree can be read as well.
"""

from __future__ import annotations

import os
import re

__all__ = ["Files", "Reading", "cpu_list", "link_mbps", "natural"]

_MOST = 1 << 16
_NUMBER = re.compile(r"[+-]?[0-9]{1,19}")
_HEXADECIMAL = re.compile(r"0x[0-9a-f]{1,16}")
_RANGE = re.compile(r"([0-9]{1,6})(?:-([0-9]{1,6}))?")

#: Payload of one PCIe lane in MB/s, by GT/s: encoding taken off, packet headers not.
_LANE = {"2.5": 250, "5": 500, "8": 985, "16": 1969, "32": 3938, "64": 7563, "128": 15125}


class Files:
    """The files below a root.

    Parameters
    ----------
    root : str
        Folder that holds ``sys`` and ``proc``.
    """

    def __init__(self, root: str = "/") -> None:
        self.root = root

    def real(self, path: str) -> str:
        """Return a path's real path, relative to the root; links of the kernel's are relative."""
        try:
            top = os.path.realpath(self.root)
            return os.path.relpath(os.path.realpath(os.path.join(top, path)), top)
        except (OSError, ValueError):
            return path

    def text(self, path: str, most: int = _MOST) -> tuple[str | None, str]:
        """Return what a file says, stripped, and otherwise None and the reason."""
        data, why = self.data(path, most)
        if data is None:
            return None, why
        return data.decode("utf-8", "replace").strip("\x00 \t\r\n"), ""

    def data(self, path: str, most: int = _MOST) -> tuple[bytes | None, str]:
        """Return what a file holds, at most so many bytes, and otherwise None and the reason."""
        try:
            # Unbuffered: sysfs makes the text at the first read, and a second one costs a call.
            with open(os.path.join(self.root, path), "rb", buffering=0, opener=_opened) as file:
                return file.read(most) or b"", ""
        except (OSError, ValueError) as error:
            return None, f"/{path}: {getattr(error, 'strerror', None) or error}"

    def names(self, path: str) -> list[str]:
        """Return the sorted names in a folder; none if it can't be listed.

        Names that are not UTF-8 are left out: the kernel makes none.
        """
        try:
            found = os.listdir(os.path.join(self.root, path))
        except (OSError, ValueError):
            return []
        return sorted(name for name in found if name.isprintable())

    def exists(self, path: str) -> bool:
        """Return whether there is such a file or folder."""
        return os.path.exists(os.path.join(self.root, path))


def _opened(path: str, flags: int) -> int:
    """Open a file without waiting for anybody: a copied tree may have a pipe in place of one."""
    return os.open(path, flags | os.O_NONBLOCK)


class Reading:
    """Reads the fields of one record and keeps the reasons of those that are unknown.

    Attributes
    ----------
    reasons : dict
        By field.
    """

    def __init__(self, files: Files) -> None:
        self.files = files
        self.reasons: dict[str, str] = {}

    @property
    def unknown(self) -> tuple[tuple[str, str], ...]:
        """The reasons in the form that `Record` takes."""
        return tuple(self.reasons.items())

    def text(self, field: str, path: str) -> str | None:
        """Return a file's text; None if it can't be read or is empty."""
        text, why = self.files.text(path)
        if not text:
            self.reasons[field] = why or f"/{path} is empty"
        return text or None

    def number(self, field: str, path: str, least: int = 0) -> int | None:
        """Return a file's whole number; None if there is none, or it is below `least`."""
        text = self.text(field, path)
        if text is None:
            return None
        if not (_NUMBER.fullmatch(text) or _HEXADECIMAL.fullmatch(text)):
            self.reasons[field] = f"/{path} says {text[:20]!r}, which is no number"
            return None
        number = int(text, 0) if text.startswith("0x") else int(text)
        if not least <= number < 1 << 63:
            self.reasons[field] = f"/{path} says {number}"
            return None
        return number

    def cpus(self, path: str) -> tuple[int, ...]:
        """Return the CPUs of a list such as ``0-3,8``; none if it can't be read."""
        return cpu_list(self.files.text(path)[0] or "") or ()

    def link(self, field: str, folder: str) -> int | None:
        """Return what a PCIe device's link carries in one direction, in MB/s."""
        speed, width = (
            self.text(field, f"{folder}/current_link_{what}") for what in ("speed", "width")
        )
        if speed is None or width is None:
            return None
        rate = link_mbps(speed, width)
        if rate is None:
            self.reasons[field] = f"/{folder}: link is {speed[:20]!r} x {width[:20]!r}"
        return rate


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key by which nvme10n1 comes after nvme9n1."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def cpu_list(text: str) -> tuple[int, ...] | None:
    """Return the numbers of a kernel list such as ``0-3,8``; None if it is no such list."""
    found: set[int] = set()
    for part in text.replace("\n", ",").split(","):
        if not part.strip():
            continue
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            return None
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last >= _MOST:
            return None
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def link_mbps(speed: str, width: str) -> int | None:
    """Return the rate of a link such as ``"16.0 GT/s PCIe"`` and ``"16"``, in MB/s.

    None if it can't be told; virtual machines report a width of 0 or 255.
    """
    match = re.match(r"([0-9]{1,3}(?:\.[0-9])?) ?GT/s", speed)
    lanes = int(width) if re.fullmatch(r"[0-9]{1,3}", width) else 0
    lane = _LANE.get(match[1].removesuffix(".0")) if match else None
    return lane * lanes if lane and 0 < lanes <= 32 else None
