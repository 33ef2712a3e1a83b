"""Names of files and checkpoints: none of them can lead out of a folder."""

from __future__ import annotations

import re

__all__ = ["LATEST", "MANIFEST", "REMOVED", "SAVING", "is_checkpoint_name", "is_file_name"]

#: The file that says what a checkpoint consists of, and that which says which one is the newest.
MANIFEST = "manifest.json"
LATEST = "latest"

#: How folders end that are being saved, or removed.
SAVING = ".saving"
REMOVED = ".removed"

_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}\.safetensors", re.ASCII)
_CHECKPOINT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}", re.ASCII)


def is_file_name(name: object) -> bool:
    """Whether a writer's file may be called that."""
    return isinstance(name, str) and _FILE.fullmatch(name) is not None


def is_checkpoint_name(name: object) -> bool:
    """Whether a checkpoint may be called that."""
    return (
        isinstance(name, str)
        and _CHECKPOINT.fullmatch(name) is not None
        and name not in (LATEST, f"{LATEST}.new")
        and not name.endswith((SAVING, REMOVED))
    )
