"""Names that are made when they are read, for hundreds of thousands of slices and resources."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import overload

__all__ = ["Joined", "Named"]


class Named(Sequence[str]):
    """`count` names, of which number i is ``make(i)``."""

    def __init__(self, count: int, make: Callable[[int], str]) -> None:
        self._count = count
        self._make = make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self._make(i) for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        return self._make(int(index) % self._count)

    def __iter__(self) -> Iterator[str]:
        return map(self._make, range(self._count))


class Joined(Sequence[str]):
    """Several sequences of names one after the other."""

    def __init__(self, *parts: Sequence[str]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index < 0:
            index += len(self)
        for part in self._parts:
            if 0 <= index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(index)

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self._parts)
