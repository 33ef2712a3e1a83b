"""The parameters that a swapper knows: tensors, and objects with an id, a numel and a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch

from tensorspill.errors import BusyError, MissingNameError, UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.swap.status import SwapStatus

__all__ = ["Entries", "Entry", "Parameter", "Swappable", "check_status", "check_stored", "numel_of"]


@runtime_checkable
class Swappable(Protocol):
    """An object that stands for a parameter.

    Attributes
    ----------
    id : hashable
        Two objects with the same id are the same parameter.
    numel : int or callable
        Number of elements.
    tensor : torch.Tensor
        The data; the swapper sets it.
    """

    id: Any
    numel: int | Callable[[], int]
    tensor: torch.Tensor


Parameter = torch.Tensor | Swappable

_placeholders: dict[torch.dtype, torch.Tensor] = {}


class Entry:
    """A parameter that the swapper knows.

    Attributes
    ----------
    owner : Parameter
    name : str
        Of its value in the spill file.
    status : SwapStatus
    stored : bool
        Whether the spill file has a value.
    numel, dtype
        Of that value, or of the parameter as long as there is none.
    home : Buffer or None
        The swapper's memory that the data lies in; none if it is somebody else's.
    taken : Buffer or None
        Memory that `ParameterSwapper.get_buffer` took.
    """

    __slots__ = (
        "_away",
        "dtype",
        "home",
        "name",
        "numel",
        "owner",
        "shape",
        "status",
        "stored",
        "taken",
    )

    def __init__(self, owner: Parameter, name: str, dtype: torch.dtype | None) -> None:
        data = _data_of(owner)
        if isinstance(owner, torch.Tensor) and dtype is not None and data.dtype is not dtype:
            raise UnsupportedError(
                f"A parameter is {data.dtype}, the swapper's are {dtype}",
                remedy="Use a swapper of that dtype, or of dtype=None for any",
            )
        self.owner = owner
        self.name = name
        self.numel = numel_of(owner)
        self.dtype = data.dtype if dtype is None else dtype
        # An object's own numel counts: its tensor may be anything while it is away.
        self.shape = data.shape if data.numel() == self.numel else torch.Size([self.numel])
        self.status = SwapStatus.AVAILABLE
        self.stored = False
        self.home: Buffer | None = None
        self.taken: Buffer | None = None
        self._away: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the value."""
        return self.numel * self.dtype.itemsize

    @property
    def data(self) -> torch.Tensor:
        """The parameter's data, without autograd."""
        owner = self.owner
        return owner.data if isinstance(owner, torch.Tensor) else owner.tensor

    @data.setter
    def data(self, data: torch.Tensor) -> None:
        owner = self.owner
        if isinstance(owner, torch.Tensor):
            owner.data = data
        else:
            owner.tensor = data

    def resize(self, numel: int) -> None:
        """Say that the parameter has another number of elements than it says itself.

        Raises
        ------
        UnsupportedError
            It is a tensor, or has a stored value, or the number is negative.
        """
        if isinstance(self.owner, torch.Tensor) or self.stored or numel < 0:
            raise UnsupportedError(f"The parameter has {self.numel} elements, not {numel}")
        self.numel = numel
        self.shape = torch.Size([numel])
        self._away = None

    def view(self, memory: Buffer | torch.Tensor) -> torch.Tensor:
        """Return the first bytes or elements of some memory in the parameter's shape and dtype."""
        if isinstance(memory, Buffer):
            tensor = memory.tensor
            if tensor.dtype is not self.dtype:
                tensor = tensor.view(-1).view(self.dtype)
            return tensor if tensor.shape == self.shape else tensor.view(self.shape)
        return memory.detach().reshape(-1)[: self.numel].view(self.shape)

    def placeholder(self) -> torch.Tensor:
        """Return data of the parameter's shape that takes no memory and is NaN where it can be."""
        away = self._away
        if away is None or away.shape != self.shape:
            away = self._away = _nothing(self.dtype).expand(self.shape)
        return away


class Entries:
    """All parameters that a swapper knows, and the lock that guards them.

    Attributes
    ----------
    lock : threading.Lock
        Held for a few steps of each entry of a batch, never while something is waited for.
    counts : dict of str to int
        What statistics report.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.lock = threading.Lock()
        self.counts = dict.fromkeys(
            ("swapped_in", "swapped_out", "failures", "bytes_in", "bytes_out"), 0
        )
        self._dtype = dtype
        self._known: dict[Any, Entry] = {}
        self._named = 0

    def find(self, parameter: Parameter) -> Entry | None:
        """Return what is known of a parameter."""
        return self._known.get(_key(parameter))

    def look_up(self, parameters: Iterable[Parameter]) -> list[Entry]:
        """Return the entries of parameters; new ones are not kept yet. Called with the lock.

        Raises
        ------
        UnsupportedError
            Something is no parameter, or is named twice.
        """
        entries = []
        seen = set()
        for parameter in parameters:
            key = _key(parameter)
            if key in seen:
                raise UnsupportedError("A parameter is named twice in a batch")
            seen.add(key)
            entry = self._known.get(key)
            if entry is None:
                self._named += 1
                entry = Entry(parameter, f"parameter {self._named}", self._dtype)
            entries.append(entry)
        return entries

    def keep(self, entries: Iterable[Entry]) -> None:
        """Know entries from now on, and with them their parameters. Called with the lock."""
        for entry in entries:
            self._known[_key(entry.owner)] = entry

    def forget(self, entries: Iterable[Entry]) -> None:
        """Know entries no more. Called with the lock."""
        for entry in entries:
            self._known.pop(_key(entry.owner), None)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._known.values()))


def check_status(entries: Iterable[Entry], *allowed: SwapStatus) -> None:
    """Refuse a batch unless all of it may be moved.

    Raises
    ------
    BusyError
        A parameter is INFLIGHT.
    UnsupportedError
        One has another status that is not `allowed`.
    """
    for entry in entries:
        if entry.status in allowed:
            continue
        shape, dtype = tuple(entry.shape), entry.dtype
        if entry.status is SwapStatus.INFLIGHT:
            raise BusyError(
                f"A parameter of shape {shape} is being read or written",
                remedy="Wait for its transfer first",
            )
        raise UnsupportedError(f"A parameter of shape {shape}, {dtype} is {entry.status.value}")


def check_stored(entries: Iterable[Entry]) -> None:
    """Refuse a batch unless the spill file has a value of each.

    Raises
    ------
    MissingNameError
    """
    for entry in entries:
        if not entry.stored:
            raise MissingNameError(
                f"A parameter of shape {tuple(entry.shape)} was never written",
                remedy="Swap it out first",
            )


def numel_of(parameter: Parameter) -> int:
    """Return the number of elements of a parameter."""
    numel = parameter.numel
    return int(numel() if callable(numel) else numel)


def _data_of(parameter: Parameter) -> torch.Tensor:
    return parameter if isinstance(parameter, torch.Tensor) else parameter.tensor


def _key(parameter: Parameter) -> Any:
    """Return what a parameter is known by; the entry keeps a tensor, so its address is its own."""
    if isinstance(parameter, torch.Tensor):
        return id(parameter)
    try:
        return ("id", parameter.id)
    except AttributeError:
        raise UnsupportedError(
            f"A {type(parameter).__name__} is no parameter: it has no id, numel and tensor"
        ) from None


def _nothing(dtype: torch.dtype) -> torch.Tensor:
    """Return one element that shows when it is used: NaN, or the largest integer."""
    if dtype not in _placeholders:
        with torch.inference_mode(False):
            _placeholders[dtype] = _unlikely(dtype)
    return _placeholders[dtype]


def _unlikely(dtype: torch.dtype) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.ones((), dtype=dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.full((), float("nan"), dtype=dtype)
    return torch.full((), torch.iinfo(dtype).max, dtype=dtype)
