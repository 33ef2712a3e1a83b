"""Python objects of a state: as bytes in DCP's form, and back without running anybody's code."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

from tensorspill.errors import CorruptError, UnsupportedError

__all__ = ["check_bytes", "dump", "restore"]

#: What needs no look whether it can be restored.
_SIMPLE = (int, float, str, bool, type(None))


def dump(name: str, value: Any) -> bytes:
    """Return an object as `torch.save` writes it, which is how DCP keeps objects.

    Raises
    ------
    UnsupportedError
        It can't be pickled, or what was pickled could not be loaded again, as only objects of a few
        known types are.
    """
    stream = io.BytesIO()
    try:
        torch.save(value, stream)
    except Exception as error:
        raise UnsupportedError(f"Object {name!r} can't be pickled: {error}") from error
    data = stream.getvalue()
    if type(value) not in _SIMPLE:
        try:
            restore(name, data)
        except CorruptError as error:
            raise UnsupportedError(
                f"Object {name!r} of type {type(value).__name__} could be saved but not loaded: "
                f"{error.__cause__}",
                remedy="Keep tensors, numbers, texts, lists and dictionaries, or name its type to "
                "torch.serialization.add_safe_globals",
            ) from error
    return data


def restore(name: str, data: bytes) -> Any:
    """Return the object that bytes stand for; only known types, so that no code of theirs runs.

    Raises
    ------
    CorruptError
        The bytes ask for another type, or are no object.
    """
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, KeyError) as error:
        raise CorruptError(
            f"Object {name!r} is not loaded, since it asks for more than plain data",
            remedy="If you trust whoever wrote it, name its types to "
            "torch.serialization.add_safe_globals",
        ) from error


def check_bytes(name: str, data: bytes) -> bytes:
    """Return bytes that `restore` takes, for a loader that unpickles whatever it is given.

    Raises
    ------
    CorruptError
        As `restore`.
    """
    restore(name, data)
    return data
