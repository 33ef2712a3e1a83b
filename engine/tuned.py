"""Settings that were measured for a device, kept in a file: engines use them by default.

The file is JSON: for each device, for each kind of engine, the options. It is named by
``TENSORSPILL_TUNED``, or is ``tensorspill/tuned.json`` in the user's folder of settings. What can't
be read, is not ours, or is out of range is left out with a warning: a settings file never keeps an
engine from opening.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from typing import Any

from tensorspill.errors import BrokenError

__all__ = ["VARIABLE", "read_tuned", "settings_path", "write_tuned"]

log = logging.getLogger(__name__)

VARIABLE = "TENSORSPILL_TUNED"
VERSION = 1
_FORM = "tensorspill-tuned"
_LARGEST_FILE = 1 << 20
PAGE = 4096

#: What may be tuned, and from where to where; sizes are multiples of a page.
_RANGES = {"block_bytes": (PAGE, 1 << 30), "depth": (1, 4096), "threads": (1, 256)}


def settings_path() -> str | None:
    """Return the file's path; None if ``TENSORSPILL_TUNED`` is empty, or there is no home."""
    named = os.environ.get(VARIABLE)
    if named is not None:
        return os.path.abspath(named) if named else None
    base = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return os.path.join(base, "tensorspill", "tuned.json") if os.path.isabs(base) else None


def read_tuned(device: str, kind: str) -> dict[str, int]:
    """Return the options that were measured for a device; none if there are none.

    Parameters
    ----------
    device : str
        As `write_tuned` was given it.
    kind : {"aio", "staged", "gds"}
        Which engine.
    """
    path = settings_path()
    whole = None if path is None else _read(path)
    entry = whole["devices"].get(device) if whole else None
    options = entry.get(kind) if isinstance(entry, dict) else None
    if not isinstance(options, dict):
        return {}
    found = {name: value for name, value in options.items() if _in_range(name, value)}
    if len(found) < len(options.keys() & _RANGES.keys()):
        log.warning("%s: some settings of %s are out of range and left out", path, device)
    return found


def write_tuned(device: str, kind: str, options: Mapping[str, int]) -> str | None:
    """Keep options for a device, and return the path of the file.

    The file is replaced as a whole, so that a reader sees the old or the new one. Settings of other
    devices and engines stay.

    Returns
    -------
    str or None
        None if there is to be no such file, see `settings_path`.

    Raises
    ------
    BrokenError
        The file can't be written; it is as it was.
    """
    path = settings_path()
    if path is None:
        return None
    whole = _read(path) or {"form": _FORM, "version": VERSION, "devices": {}}
    entry = whole["devices"].get(device)
    kept = entry if isinstance(entry, dict) else {}
    whole["devices"][device] = kept | {kind: dict(options)}
    try:
        _replace(path, json.dumps(whole, indent=1) + "\n")
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't write the settings", path=path) from error
    return path


def _replace(path: str, text: str) -> None:
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    fd, made = tempfile.mkstemp(prefix=".tuned-", dir=folder)
    try:
        with open(fd, "w") as file:
            file.write(text)
        os.replace(made, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(made)
        raise


def _read(path: str) -> dict[str, Any] | None:
    """Return the file's content, or None if there is none that can be used."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            log.warning("Settings not read: %s", error)
        return None
    with open(fd, "rb") as file:
        if os.fstat(fd).st_uid not in (os.geteuid(), 0):
            log.warning("%s belongs to another user and is not used", path)
            return None
        try:
            whole = json.loads(file.read(_LARGEST_FILE))
        except (OSError, ValueError, RecursionError) as error:
            log.warning("%s is no settings file: %s", path, error)
            return None
    if (
        not isinstance(whole, dict)
        or whole.get("form") != _FORM
        or whole.get("version") != VERSION
        or not isinstance(whole.get("devices"), dict)
    ):
        log.warning("%s is no settings file of this version", path)
        return None
    return whole


def _in_range(name: str, value: Any) -> bool:
    if name not in _RANGES or not isinstance(value, int) or isinstance(value, bool):
        return False
    least, most = _RANGES[name]
    return least <= value <= most and (name != "block_bytes" or value % PAGE == 0)
