"""Options: frozen dataclasses filled from arguments, environment, tuned settings and defaults."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from tensorspill.errors import UnsupportedError
from tensorspill.pool.sizes import parse_bytes

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    OptionsT = TypeVar("OptionsT", bound=DataclassInstance)
else:
    OptionsT = TypeVar("OptionsT")

__all__ = ["Resolved", "resolve"]

PREFIX = "TENSORSPILL_"


@dataclass(frozen=True, slots=True)
class Resolved(Generic[OptionsT]):
    """Options in force, and where each came from.

    Attributes
    ----------
    values : frozen dataclass
        The options.
    sources : mapping of str to str
        "argument", "environment", "tuned" or "default" for each field.
    """

    values: OptionsT
    sources: Mapping[str, str]

    def described(self) -> dict[str, tuple[Any, str]]:
        """Return {name: (value, source)}, as statistics report it."""
        return {name: (getattr(self.values, name), source) for name, source in self.sources.items()}


def resolve(
    cls: type[OptionsT],
    arguments: Mapping[str, Any],
    tuned: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Resolved[OptionsT]:
    """Fill the options dataclass `cls`: argument, else environment, else tuned, else default.

    Parameters
    ----------
    cls : frozen dataclass
        Checks its own values in ``__post_init__``. Fields are text where the default is text, else
        integers or sizes.
    arguments : mapping
        What the caller gave; None counts as not given.
    tuned : mapping, optional
        Settings measured for this device.
    environment : mapping, optional
        `os.environ` if not given; the option ``depth`` is read from ``TENSORSPILL_DEPTH``.

    Raises
    ------
    UnsupportedError
        An option that `cls` does not have, or a value that it refuses.
    """
    environment = os.environ if environment is None else environment
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(set(arguments) - set(fields))
    if unknown:
        raise UnsupportedError(
            f"Unknown option {unknown[0]!r}; {cls.__name__} has {', '.join(sorted(fields))}"
        )
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}
    for name, field in fields.items():
        variable = PREFIX + name.upper()
        if arguments.get(name) is not None:
            values[name], sources[name] = arguments[name], "argument"
        elif variable in environment:
            values[name], sources[name] = environment[variable], "environment"
        elif tuned is not None and name in tuned:
            values[name], sources[name] = tuned[name], "tuned"
        else:
            sources[name] = "default"
            continue
        if isinstance(field.default, int | None) and not isinstance(field.default, bool):
            values[name] = _integer(name, values[name])
    return Resolved(cls(**values), sources)


def _integer(name: str, value: Any) -> int:
    if not isinstance(value, int | str) or isinstance(value, bool):
        raise UnsupportedError(f"Option {name} needs an integer or a size, not {value!r}")
    return parse_bytes(value)
