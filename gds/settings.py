"""kvikio's settings for the whole process: lent to the engines that are open, then given back."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tensorspill.gds.options import GdsOptions

__all__ = ["Lease", "compat_mode", "opening_with"]

_lock = threading.RLock()
_leases: list[Lease] = []
#: What kvikio had before the first engine was opened.
_before: dict[str, Any] = {}


class Lease:
    """An engine's hold on kvikio's settings, from its opening to its closing.

    Parameters
    ----------
    options : GdsOptions
    """

    def __init__(self, options: GdsOptions) -> None:
        self._wanted = _wanted(options)
        with _lock:
            _leases.append(self)
            _apply()

    def overruled(self) -> list[str]:
        """Return, in words, what other engines' options changed about this one's."""
        with _lock:
            return [
                f"kvikio's {name} is {now!r} for the whole process, not {self._wanted[name]!r}: "
                "other engines are open"
                for name, now in _agreed().items()
                if now != self._wanted[name]
            ]

    def close(self) -> None:
        """Give the hold back; a second time does no harm."""
        with _lock:
            if self in _leases:
                _leases.remove(self)
                _apply()


def _wanted(options: GdsOptions) -> dict[str, Any]:
    direct = options.direct != "no"
    return {
        "num_threads": options.threads,
        "gds_threshold": options.threshold_bytes,
        "auto_direct_io_read": direct,
        "auto_direct_io_write": direct,
    }


def _agreed() -> dict[str, Any]:
    """Return what holds for all engines that are open."""
    agreed = dict(_leases[0]._wanted)
    agreed["num_threads"] = max(lease._wanted["num_threads"] for lease in _leases)
    return agreed


def _apply() -> None:
    import kvikio.defaults

    wanted = _agreed() if _leases else dict(_before)
    for name, value in wanted.items():
        try:
            held = kvikio.defaults.get(name)
        except KeyError:  # a release of kvikio without it
            continue
        _before.setdefault(name, held)
        # Setting the number of threads makes a new pool, even of the same size.
        if held != value:
            kvikio.defaults.set(name, value)
    if not _leases:
        _before.clear()


def compat_mode() -> str:
    """Return kvikio's own setting: "on", "off" or "auto"."""
    import kvikio.defaults

    return str(kvikio.defaults.get("compat_mode").name).lower()


@contextmanager
def opening_with(compat: bool) -> Iterator[None]:
    """Let files that are opened in the block be in compatibility mode, or not.

    kvikio reads the setting when it opens a file. Other libraries of the process that open one at
    this very moment get it as well.
    """
    import kvikio
    import kvikio.defaults

    mode = kvikio.CompatMode.ON if compat else kvikio.CompatMode.OFF
    with _lock, kvikio.defaults.set("compat_mode", mode):
        yield
