"""What a spill file says of itself: frozen records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tensorspill.engine.statistics import EngineStatistics

__all__ = ["Location", "SpillStatistics", "StoredTensor"]


class Location(NamedTuple):
    """A range of a file that holds bytes of one tensor."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What is known of a stored tensor.

    Attributes
    ----------
    name : str
    shape : tuple of int
    dtype : torch.dtype
    nbytes : int
    extents : tuple of Location
        Where its bytes are, in order.
    digest : int or None
        Of its bytes; None without ``verify``, or while its `put` is under way.
    torn : bool
        An overwrite in place failed: the bytes are undefined until the next good `put`.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    extents: tuple[Location, ...]
    digest: int | None
    torn: bool


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """The state of a spill file and what it did.

    Attributes
    ----------
    names : int
        Tensors stored, those whose `put` is under way included.
    stored_bytes : int
        Bytes of these tensors.
    capacity : int
        Bytes that tensors can take, rounded up to blocks each; the length of the files where no
        capacity was given.
    free, largest : int
        Of the capacity, what is not taken; the largest extent that is free now. A tensor need not
        fit into one extent.
    in_flight : int
        Puts and gets that have not ended.
    puts, gets, deletes, failures : int
        Batches begun, names deleted, batches that failed or were cancelled.
    in_place : int
        Tensors overwritten where they were, for lack of room for a second copy.
    growths : int
        Times that a file was made longer.
    waits : int
        Times that a call had to wait for an earlier transfer.
    engines : tuple of EngineStatistics
        One for each folder.
    """

    names: int
    stored_bytes: int
    capacity: int
    free: int
    largest: int
    in_flight: int
    puts: int
    gets: int
    deletes: int
    failures: int
    in_place: int
    growths: int
    waits: int
    engines: tuple[EngineStatistics, ...]
