"""cuFile's configuration file: where it is, and whether libcufile could read it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["CufileJson", "read"]

VARIABLE = "CUFILE_ENV_PATH_JSON"
DEFAULT = "/etc/cufile.json"

#: NVIDIA's own file has comments to the end of a line and blocks of them, which JSON has not; text
#: in quotes is matched first, so that what looks like a comment in it is kept.
_COMMENT = re.compile(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', re.DOTALL)


@dataclass(frozen=True, slots=True)
class CufileJson:
    """What was found.

    Attributes
    ----------
    path : str
        Empty if there is no file; libcufile uses its defaults then, and has no stream operations.
    problem : str
        Why libcufile can't read it; empty if it can.
    properties : mapping of str to object
        The section of that name.
    """

    path: str = ""
    problem: str = ""
    properties: Mapping[str, Any] = field(default_factory=dict)


def read(environment: Mapping[str, str] | None = None) -> CufileJson:
    """Find and read the file; never raises."""
    environment = os.environ if environment is None else environment
    named = environment.get(VARIABLE)
    path = named or DEFAULT
    if not named and not os.path.exists(path):
        return CufileJson()
    try:
        # Without waiting for anybody: it may be a pipe.
        with open(path, encoding="utf-8", opener=_opened) as file:
            content = json.loads(_COMMENT.sub(lambda found: found.group(1) or "", file.read()))
    except (OSError, ValueError) as error:
        return CufileJson(path, " ".join(str(error).split()))
    properties = content.get("properties", {}) if isinstance(content, dict) else None
    if not isinstance(properties, dict):
        return CufileJson(path, "it has no object where one belongs")
    return CufileJson(path, "", properties)


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)
