"""Records: frozen data whose unknown fields say why, with a JSON form that reads back equal."""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from typing import Any, Self, Union, get_args, get_origin

from tensorspill.errors import UnsupportedError

__all__ = ["NOT_STATED", "Record"]

#: The reason of an unknown field for which nobody gave one.
NOT_STATED = "not stated"

_PLAIN = (int, float, str, bool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Record:
    """Base of frozen records; a field that is None is unknown, and has a reason.

    Parameters
    ----------
    unknown : tuple of pairs of str
        The reason for each field that is None. Reasons for other fields are dropped, and a missing
        one becomes `NOT_STATED`, so that equal records are equal in every field.
    """

    unknown: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        reasons = dict(self.unknown)
        missing = [name for name in _optional(type(self)) if getattr(self, name) is None]
        known = tuple(sorted((name, reasons.get(name) or NOT_STATED) for name in missing))
        object.__setattr__(self, "unknown", known)

    def why(self, field: str) -> str:
        """Return why a field is unknown, or an empty string if it is known."""
        return dict(self.unknown).get(field, "")

    def to_json(self) -> dict[str, Any]:
        """Return the record as dictionaries, lists, strings, numbers and None.

        A field at its default is left out.
        """
        return {
            field.name: _encoded(value)
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    def dump(self) -> str:
        """Return the record as one line of JSON, the same for equal records."""
        return json.dumps(self.to_json(), separators=(",", ":"), sort_keys=True)

    @classmethod
    def from_json(cls, value: Any, where: str = "") -> Self:
        """Return the record that `to_json` gave.

        Parameters
        ----------
        value
            What `json.loads` returned.
        where : str
            What the value is part of, for errors.

        Raises
        ------
        UnsupportedError
            The value has another form; the error names the field.
        """
        name = where or cls.__name__
        if not isinstance(value, dict):
            raise UnsupportedError(f"{name} must be a JSON object, not {_shown(value)}")
        hints = _hints(cls)
        if strange := set(value) - set(hints):
            raise UnsupportedError(f"{name} has unknown fields: {', '.join(sorted(strange))}")
        fields = {key: _decoded(hints[key], item, f"{name}.{key}") for key, item in value.items()}
        for field in dataclasses.fields(cls):
            needed = field.default is dataclasses.MISSING
            if needed and field.name not in fields:
                raise UnsupportedError(f"{name} lacks the field {field.name}")
        return cls(**fields)

    @classmethod
    def parse(cls, text: str | bytes) -> Self:
        """Return the record that `dump` gave.

        Raises
        ------
        UnsupportedError
            The text is not JSON, or not of this record.
        """
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise UnsupportedError(f"{cls.__name__}: not JSON: {error}") from error
        return cls.from_json(value)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type[Record]) -> dict[str, Any]:
    """Return the types of a record's fields."""
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


_OPTIONAL: dict[type, tuple[str, ...]] = {}


def _optional(cls: type[Record]) -> tuple[str, ...]:
    """Return the names of the fields that may be None."""
    if cls not in _OPTIONAL:
        may_be = (name for name, hint in _hints(cls).items() if type(None) in get_args(hint))
        _OPTIONAL[cls] = tuple(may_be)
    return _OPTIONAL[cls]


def _encoded(value: Any) -> Any:
    if isinstance(value, Record):
        return value.to_json()
    if isinstance(value, tuple):
        return [_encoded(item) for item in value]
    return value


def _decoded(hint: Any, value: Any, where: str) -> Any:
    """Return a JSON value as an object of a field's type."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        (inner,) = (part for part in get_args(hint) if part is not type(None))
        return None if value is None else _decoded(inner, value, where)
    if origin is tuple:
        return _decoded_tuple(get_args(hint), value, where)
    if isinstance(hint, type) and issubclass(hint, Record):
        return hint.from_json(value, where)
    if hint not in _PLAIN or type(value) is not hint:
        raise UnsupportedError(f"{where} must be {_named(hint)}, not {_shown(value)}")
    return value


def _decoded_tuple(inner: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise UnsupportedError(f"{where} must be a JSON array, not {_shown(value)}")
    if inner[-1] is Ellipsis:
        return tuple(_decoded(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(value) != len(inner):
        raise UnsupportedError(f"{where} must have {len(inner)} items, not {len(value)}")
    pairs = zip(inner, value, strict=True)
    return tuple(_decoded(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(pairs))


def _named(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
