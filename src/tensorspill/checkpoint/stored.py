"""States in a checkpoint that are read a tensor at a time, for who can't hold all of them."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, ValuesView
from typing import Any

import torch

from tensorspill.checkpoint.distributed.nested import put
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.reading import Reader, Want
from tensorspill.checkpoint.objects import restore
from tensorspill.errors import MissingNameError

__all__ = ["StoredStates"]


class StoredStates:
    """State dictionaries whose tensors are read when they are asked for.

    Parameters
    ----------
    reader : Reader
        Must be open while they are used.

    Attributes
    ----------
    used : set of str
        Names that the dictionaries have.
    bytes_needed, bytes_read : int
    seconds : float
        Of what was asked for.
    """

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.used: set[str] = set()
        self.bytes_needed = self.bytes_read = 0
        self.seconds = 0.0

    def of(self, top: str) -> dict[str, Any]:
        """Return the state dictionary that is kept under a name at the top.

        Raises
        ------
        MissingNameError
            There is none.
        """
        state: dict[str, Any] = {}
        for name, path in self._reader.manifest.key_paths.items():
            if path[0] != top or len(path) < 2:
                continue
            self.used.add(name)
            if name in self._reader.manifest.tensors:
                value: Any = _Stored(name)
            else:
                value = restore(name, self._reader.read_object(name))
            put(state, path[1:], value)
        if not state:
            raise MissingNameError(
                f"The checkpoint has no state of {top!r}", path=self._reader.folder
            )
        return {key: self._lazy(value) for key, value in state.items()}

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor of the checkpoint, all of it."""
        known = self._reader.manifest.tensors[name]
        tensor = torch.empty(known.shape, dtype=known.dtype)
        record = self._reader.read([Want(name, Box.whole(known.shape), tensor)])
        self.bytes_needed += record.bytes_needed
        self.bytes_read += record.bytes_read
        self.seconds += record.seconds
        return tensor

    def _lazy(self, value: Any) -> Any:
        """Let dictionaries that have tensors in them read these."""
        if isinstance(value, dict):
            if any(isinstance(item, _Stored) for item in value.values()):
                return _LazyState(self, value)
            return {key: self._lazy(item) for key, item in value.items()}
        return self.read(value.name) if isinstance(value, _Stored) else value


class _Stored:
    """Stands for a tensor of the checkpoint."""

    def __init__(self, name: str) -> None:
        self.name = name


class _LazyState(dict[Any, Any]):
    """A dictionary that reads a tensor each time that it is asked for it."""

    def __init__(self, states: StoredStates, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self._states = states

    def __getitem__(self, key: Any) -> Any:
        value = super().__getitem__(key)
        return self._states.read(value.name) if isinstance(value, _Stored) else value

    def __iter__(self) -> Iterator[Any]:
        return super().__iter__()

    def get(self, key: Any, default: Any = None) -> Any:
        return self[key] if key in self else default  # noqa: SIM401 (that is this method)

    def items(self) -> ItemsView[Any, Any]:  # type: ignore[override]
        return ItemsView(self)

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        return ValuesView(self)
