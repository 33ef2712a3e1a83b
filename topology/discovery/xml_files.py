"""What NCCL's and hwloc's XML have in common: parsing, and masks of CPUs."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Final
from xml.etree import ElementTree

from tensorspill.errors import BrokenError, UnsupportedError

__all__ = ["cpus_of_mask", "naming", "parse_xml", "whole_number"]

_MOST: Final = 64 << 20


def parse_xml(path: str, root: str) -> ElementTree.Element:
    """Return the root element of an XML file.

    Entities are refused: neither format uses them, and they can be made to expand without end.

    Raises
    ------
    BrokenError
        The file can't be read.
    UnsupportedError
        It is no XML, is cut short, or has another root element; the error names the file.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(_MOST + 1)
    except OSError as error:
        raise BrokenError.from_oserror(error, "Can't read the topology", path=path) from error
    if len(data) > _MOST:
        raise UnsupportedError("The topology is larger than 64 MiB", path=path)
    if b"<!ENTITY" in data:
        raise UnsupportedError("The topology declares entities", path=path)
    try:
        element = ElementTree.fromstring(data)  # noqa: S314
    except (ElementTree.ParseError, ValueError, LookupError) as error:
        raise UnsupportedError(f"The topology is no XML: {error}", path=path) from error
    if element.tag != root:
        why = f"The topology starts with <{element.tag[:40]}> and not with <{root}>"
        raise UnsupportedError(why, path=path)
    return element


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Let errors about what a file describes name the file.

    Raises
    ------
    UnsupportedError
        What was raised inside, with the path; or elements are nested too deeply.
    """
    try:
        yield
    except UnsupportedError as error:
        if error.path is not None:
            raise
        raise UnsupportedError(error.message, path=path) from error
    except RecursionError as error:
        raise UnsupportedError("The topology is nested too deeply", path=path) from error


def whole_number(text: str | None) -> int | None:
    """Return a whole number that is not negative, or None."""
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,18}", text) else None


def cpus_of_mask(text: str) -> tuple[int, ...]:
    """Return the numbers in a mask such as ``000000ff,ffff0000`` or ``0xff,,0x1``, last word first.

    An empty word is zero, as hwloc writes it; what is no mask gives none.
    """
    words = text.strip().split(",") if text.strip() else []
    found: list[int] = []
    for index, word in enumerate(reversed(words)):
        match = re.fullmatch(r"(?:0x)?([0-9a-fA-F]{0,8})", word.strip())
        if match is None:
            return ()
        value = int(match[1] or "0", 16)
        found.extend(32 * index + bit for bit in range(32) if value >> bit & 1)
    return tuple(found)
