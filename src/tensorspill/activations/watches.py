"""Looking at memory without holding it: whether it was changed, and whether it is in use."""

from __future__ import annotations

from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_weak_reference: Any = StorageWeakRef  # which has no types

__all__ = ["StorageWatch", "VersionWatch", "bytes_of"]


class VersionWatch:
    """Notices changes in place of a tensor, as autograd does, without keeping its memory.

    Parameters
    ----------
    tensor : torch.Tensor
        Changes of it, its views and what it is a view of are noticed.
    """

    __slots__ = ("_alias", "saved")

    def __init__(self, tensor: torch.Tensor) -> None:
        # Shares the counter of versions, which stays when the memory is exchanged.
        self._alias = tensor.detach()
        self._alias.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        self.saved = tensor._version

    @property
    def current(self) -> int:
        """The tensor's version now."""
        return self._alias._version

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self.current != self.saved


class StorageWatch:
    """A weak reference to a tensor's memory."""

    __slots__ = ("_reference", "address")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference: Any = _weak_reference(storage)
        self.address = storage.data_ptr()

    @property
    def key(self) -> int:
        """What is the same for all tensors in this memory, and no others while this lives."""
        key: int = self._reference.cdata
        return key

    @property
    def gone(self) -> bool:
        """Whether nobody uses the memory any more."""
        return bool(self._reference.expired())

    def get(self) -> torch.UntypedStorage | None:
        """Return the memory, if somebody uses it still and it is where it was."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self.key)
        if storage is None or storage.data_ptr() != self.address:
            return None
        return storage


def bytes_of(storage: torch.UntypedStorage, begin: int, nbytes: int) -> torch.Tensor:
    """Return a range of memory as a tensor of bytes."""
    nothing = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return nothing.set_(storage, begin, (nbytes,), (1,))
