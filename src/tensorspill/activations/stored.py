"""A range of memory that autograd needs again, and tensors that lie in it."""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import torch

from tensorspill.activations.watches import StorageWatch, VersionWatch
from tensorspill.engine.transfer import Transfer
from tensorspill.saved_tensors import Saved

__all__ = ["Place", "StoredRange", "StoredTensor"]


class Place(enum.Enum):
    """Where a range's bytes are."""

    #: In memory, and being written.
    GOING = enum.auto()
    #: On the drive only.
    AWAY = enum.auto()
    #: Being read.
    COMING = enum.auto()
    #: In memory; on the drive as well if `stored`.
    HERE = enum.auto()


class StoredRange:
    """A range of some memory whose bytes autograd needs again; lives as long as it does.

    Attributes
    ----------
    name : str
        In the spill file.
    serial : int
        Grows from range to range.
    begin, nbytes : int
        Which bytes of the memory.
    source : StorageWatch
        Of the memory; it may be in use by others still.
    version : VersionWatch
        Of what was in it.
    place : Place
    memory : torch.Tensor or None
        The bytes, or where they are being read into.
    transfer : Transfer or None
        That is under way.
    stored, used : bool
        Whether the drive has the bytes; whether they were needed before.
    """

    __slots__ = (
        "__weakref__",
        "_dropped",
        "begin",
        "memory",
        "name",
        "nbytes",
        "place",
        "serial",
        "source",
        "stored",
        "transfer",
        "used",
        "version",
    )

    def __init__(
        self,
        serial: int,
        memory: torch.Tensor,
        begin: int,
        source: StorageWatch,
        version: VersionWatch,
        dropped: deque[tuple[str, int]],
    ) -> None:
        self.name = f"saved {serial}"
        self.serial = serial
        self.begin = begin
        self.nbytes = memory.nbytes
        self.source = source
        self.version = version
        self.place = Place.HERE
        self.memory: torch.Tensor | None = memory
        self.transfer: Transfer | None = None
        self.stored = self.used = False
        self._dropped = dropped

    def holds(self, tensor: torch.Tensor, begin: int, nbytes: int) -> bool:
        """Whether it has these bytes of the memory, which are a tensor's, as they are now."""
        inside = self.begin <= begin and begin + nbytes <= self.begin + self.nbytes
        if not inside or begin % tensor.element_size() or self.begin % tensor.element_size():
            return False
        return self.version.saved == self.version.current == tensor._version

    @property
    def in_place(self) -> bool:
        """Whether its memory is still where it was: others may have resized it to nothing."""
        memory = self.memory
        return memory is not None and memory.data_ptr() == self.source.address + self.begin

    def let_go(self) -> None:
        """Note that its bytes are on the drive only."""
        # First the place: whatever an interrupt leaves of the rest, it is read again.
        self.place = Place.AWAY
        self.memory = self.transfer = None

    def __del__(self) -> None:
        # Called anywhere, by the garbage collector too: only notes that the room is free.
        self._dropped.append((self.name, self.serial))


class StoredTensor(Saved):
    """What autograd keeps in place of a tensor: its form, and the range that it lies in.

    Parameters
    ----------
    tensor : torch.Tensor
    version : VersionWatch
        Of the tensor.
    range_ : StoredRange
        Which has its bytes.
    bring : callable
        Returns the bytes of a range.
    """

    __slots__ = ("_bits", "_bring", "_dtype", "_offset", "_shape", "_stride", "_version", "range")

    def __init__(
        self,
        tensor: torch.Tensor,
        version: VersionWatch,
        range_: StoredRange,
        bring: Callable[[StoredRange], torch.Tensor],
    ) -> None:
        self.range = range_
        self._bring = bring
        self._dtype = tensor.dtype
        self._shape = tensor.shape
        self._stride = tensor.stride()
        self._offset = tensor.storage_offset() - range_.begin // tensor.element_size()
        self._bits = (tensor.is_conj(), tensor.is_neg())
        self._version = version

    def unpack(self) -> torch.Tensor:
        """Return the tensor again.

        Raises
        ------
        RuntimeError
            It was changed in place since, as torch says it of tensors in memory.
        SpillError
            It could not be read.
        """
        version = self._version
        if version.changed:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: [{self._dtype} {list(self._shape)}], which was spilled, is "
                f"at version {version.current}; expected version {version.saved} instead."
            )
        memory = self._bring(self.range)
        with torch.no_grad():
            whole = torch.empty(0, dtype=self._dtype, device=memory.device)
            offset = memory.storage_offset() // whole.element_size() + self._offset
            view = whole.set_(memory.untyped_storage(), offset, self._shape, self._stride)
            conjugate, negative = self._bits
            view = view.conj() if conjugate else view
            result: torch.Tensor = torch._neg_view(view) if negative else view
        return result
