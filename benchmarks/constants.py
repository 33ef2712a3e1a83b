"""Giving a constant of the engine another value, to measure whether it is the right one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

__all__ = ["constant"]


@contextmanager
def constant(module: ModuleType, name: str, value: int) -> Iterator[None]:
    """Give a module's constant another value meanwhile.

    Only for those that are looked up when they are used; compiled code has its own copy.
    """
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
