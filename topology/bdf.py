"""PCI addresses: one spelling for each (domain:bus:device.function, as in sysfs)."""

from __future__ import annotations

import re

from tensorspill.errors import UnsupportedError

__all__ = ["as_bdf", "is_bdf"]

_FORM = re.compile(
    r"(?:(?P<domain>[0-9a-f]{1,8}):)?(?P<bus>[0-9a-f]{1,2}):(?P<slot>[01]?[0-9a-f])"
    r"(?:\.(?P<function>[0-7]))?"
)


def as_bdf(text: str) -> str:
    """Return a PCI address as sysfs spells it.

    Parameters
    ----------
    text : str
        In any spelling: upper case, a domain of eight digits (NVML) or none (lspci), no function.

    Raises
    ------
    UnsupportedError
        It is not a PCI address.
    """
    match = _FORM.fullmatch(text.strip().lower())
    if match is None:
        raise UnsupportedError(f"{text[:60]!r} is not a PCI address such as 0000:3b:00.0")
    domain = int(match["domain"] or "0", 16)
    bus, slot = int(match["bus"], 16), int(match["slot"], 16)
    return f"{domain:04x}:{bus:02x}:{slot:02x}.{match['function'] or '0'}"


def is_bdf(text: str) -> bool:
    """Return whether a text is a PCI address in some spelling."""
    return _FORM.fullmatch(text.strip().lower()) is not None
