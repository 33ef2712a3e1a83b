"""Reading parts of tensors out of a checkpoint's files."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import torch

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.manifest import Manifest
from tensorspill.pool.buffer_pool import BufferPool

__all__ = ["ReadRecord", "Reader", "Want"]


@dataclass(frozen=True, slots=True, eq=False)
class Want:
    """A part of a tensor, and where it shall go.

    Attributes
    ----------
    name : str
    box : Box
    destination : torch.Tensor
        Of shape ``box.lengths`` and the tensor's own dtype; any strides, any device.
    """

    name: str
    box: Box
    destination: torch.Tensor


@dataclass(frozen=True, slots=True)
class ReadRecord:
    """What a read did.

    Attributes
    ----------
    bytes_needed : int
        Bytes of the destinations.
    bytes_read : int
        Bytes that the drive was asked for.
    seconds : float
    """

    bytes_needed: int
    bytes_read: int
    seconds: float


class Reader:
    """Reads a committed checkpoint; every byte is checked against the digests before it counts.

    Parameters
    ----------
    folder : str or path
        Of the checkpoint.
    manifest : Manifest, optional
        Read from the folder if not given.
    engine : Engines, optional
        Opened here if not given.
    staging : BufferPool, optional
        Made here if not given.
    """

    manifest: Manifest

    def __init__(
        self,
        folder: str | os.PathLike[str],
        manifest: Manifest | None = None,
        *,
        engine: Engines | None = None,
        staging: BufferPool | None = None,
    ) -> None:
        raise NotImplementedError

    def read(self, wants: Iterable[Want]) -> ReadRecord:
        """Read parts of tensors into their destinations.

        Raises
        ------
        CorruptError
            Bytes differ from those written, or a file has another length. Destinations are
            undefined.
        MissingNameError, UnsupportedError
            There is no such tensor, or the destination has another dtype or shape; nothing was
            read.
        BrokenError
            A file is missing or can't be read.
        """
        raise NotImplementedError

    def read_object(self, name: str) -> bytes:
        """Return the bytes of a Python object, which are not unpickled here.

        Raises
        ------
        MissingNameError, CorruptError, BrokenError
            As `read`.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the files, and what was opened here; a second time does no harm."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
