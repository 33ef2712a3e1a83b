"""Sizes in bytes: reading what people write ("4GiB") and writing what people read."""

from __future__ import annotations

import re

from tensorspill.errors import UnsupportedError

__all__ = ["format_bytes", "parse_bytes", "round_down", "round_up"]

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS = {
    "": 1,
    "b": 1,
    **{f"{prefix}ib": 1024**power for power, prefix in enumerate("kmgt", 1)},
    **{f"{prefix}b": 1000**power for power, prefix in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def parse_bytes(size: int | str) -> int:
    """Return a size in bytes: an integer as it is, or text such as "4GiB", "512 MB", "4096".

    Raises
    ------
    UnsupportedError
        The text is no size, or the size is negative.
    """
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise UnsupportedError(f"{size!r} is no size; write it as 4GiB, 512MB or 4096")
        number = int(match[1]) if match[1].isdecimal() else float(match[1])
        return int(number * _UNITS[match[2].lower()])
    if size < 0:
        raise UnsupportedError(f"A size can't be negative: {size}")
    return int(size)


def format_bytes(nbytes: float) -> str:
    """Return a size in binary units with three significant digits, such as "1.50 MiB"."""
    value, unit = float(nbytes), _BINARY[0]
    for unit in _BINARY:
        if abs(value) < 1024 or unit == _BINARY[-1]:
            break
        value /= 1024
    return f"{int(value)} B" if unit == "B" else f"{value:.3g} {unit}"


def round_up(value: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `value`."""
    return -(-value // step) * step


def round_down(value: int, step: int) -> int:
    """Return the largest multiple of `step` that is at most `value`."""
    return value // step * step
