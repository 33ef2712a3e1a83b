"""Nested states: their values by name, and back.

Names are those of torch.distributed.checkpoint (DCP), so that either's checkpoints can be loaded
into a state for the other: the path joined by dots, where dictionaries are always entered, and
lists only if there is a tensor or a dictionary in them.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from itertools import pairwise
from typing import Any

import torch

from tensorspill.errors import UnsupportedError

__all__ = ["Path", "flatten", "put", "rebuild"]

Path = tuple[str | int, ...]


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Path]]:
    """Return ({name: value}, {name: path}) of a nested state.

    Raises
    ------
    UnsupportedError
        Two values have the same name.
    """
    flat: dict[str, Any] = {}
    paths: dict[str, Path] = {}
    _visit(state, "", (), flat, paths)
    return flat, paths


def _visit(
    value: Any, prefix: str, path: Path, flat: dict[str, Any], paths: dict[str, Path]
) -> None:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    for key, item in pairs:
        part = key if isinstance(value, list) else str(key)
        name = f"{prefix}{part}"
        if not isinstance(item, torch.Tensor) and _is_entered(item):
            _visit(item, f"{name}.", (*path, part), flat, paths)
            continue
        if name in flat:
            raise UnsupportedError(f"Two values of the state have the name {name!r}")
        flat[name] = item
        paths[name] = (*path, part)


def _is_entered(value: Any) -> bool:
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    return any(
        isinstance(item, torch.Tensor) or (isinstance(item, Mapping | list) and _is_entered(item))
        for item in value
    )


def rebuild(state: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same nested state with other values, by the names that `flatten` gives."""
    found: dict[str, Any] = _rebuilt(state, "", values)
    return found


def _rebuilt(value: Any, prefix: str, values: Mapping[str, Any]) -> Any:
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
    made = []
    for key, item in pairs:
        name = f"{prefix}{key}"
        inside = not isinstance(item, torch.Tensor) and _is_entered(item)
        made.append((key, _rebuilt(item, f"{name}.", values) if inside else values[name]))
    return dict(made) if isinstance(value, Mapping) else [item for _, item in made]


def put(state: MutableMapping[Any, Any], path: Path, value: Any) -> None:
    """Put a value where a path leads, making dictionaries and lists that are missing.

    Keys that are numbers are texts in paths; one that is there is found nevertheless, and where
    none is there, digits become a number, as in the state of optimizers.
    """
    container: Any = state
    for part, following in pairwise(path):
        key = _key(container, part)
        if isinstance(container, list):
            container.extend([None] * (key + 1 - len(container)))
            if container[key] is None:
                container[key] = [] if isinstance(following, int) else {}
        elif key not in container:
            container[key] = [] if isinstance(following, int) else {}
        container = container[key]
    key = _key(container, path[-1])
    if isinstance(container, list):
        container.extend([None] * (key + 1 - len(container)))
    container[key] = value


def _key(container: Any, part: str | int) -> Any:
    if isinstance(container, list) or not isinstance(part, str) or part in container:
        return part
    for key in container:
        if str(key) == part:
            return key
    if not all(isinstance(key, int) for key in container):
        return part
    return int(part) if part.isdecimal() and str(int(part)) == part else part
