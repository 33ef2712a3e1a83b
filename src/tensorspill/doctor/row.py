"""What the doctor says: frozen data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

__all__ = ["Diagnosis", "Row", "State", "guarded"]

State = Literal["ok", "no", "unknown"]


@dataclass(frozen=True, slots=True)
class Row:
    """One layer.

    Attributes
    ----------
    layer : str
    state : {"ok", "no", "unknown"}
        Whether it is as the fastest path needs it.
    evidence : str
        What was seen.
    remedy : str
        What can be done about it; may be empty.
    """

    layer: str
    state: State
    evidence: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """All that was found.

    Attributes
    ----------
    path : str
        The folder looked at.
    root : str
        Where ``sys`` and ``proc`` were read.
    rows : tuple of Row
        The layers.
    backends : tuple of Row
        For each backend, whether it would work.
    """

    path: str
    root: str
    rows: tuple[Row, ...]
    backends: tuple[Row, ...]

    def backend(self, name: str) -> Row:
        """Return the verdict on a backend."""
        return next(row for row in self.backends if row.layer == name)

    def to_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain data."""
        return asdict(self)


def guarded(layer: str, look: Callable[[], Row]) -> Row:
    """Return what a look at a layer finds; should it fail, that is what was found."""
    try:
        row = look()
    except Exception as error:
        return Row(layer, "unknown", f"Not looked at: {type(error).__name__}: {error}")
    return replace(row, layer=layer)
