"""What is known of a checkpoint's files: frozen records that travel between ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.pool.sizes import round_up

__all__ = [
    "BoxRecord",
    "FileRecord",
    "ObjectRecord",
    "TensorRecord",
    "Written",
    "digest_count",
    "digest_span",
]

SMALLEST_SPAN, LARGEST_SPAN = 64 << 10, 4 << 20


def digest_span(nbytes: int) -> int:
    """Return how many bytes of a chunk have a digest of their own: a power of two.

    A 64th of the chunk, so that reading some of its rows and checking them reads little more; from
    64 KiB to 4 MiB, so that there are neither too many nor too large ones.
    """
    wanted = max(nbytes // 64, 1)
    return min(max(1 << (wanted - 1).bit_length(), SMALLEST_SPAN), LARGEST_SPAN)


def digest_count(nbytes: int, span: int) -> int:
    """Return how many digests a chunk has."""
    return round_up(nbytes, span) // span


@dataclass(frozen=True, slots=True)
class BoxRecord:
    """Where a part of a tensor is.

    Attributes
    ----------
    box : Box
    file : str
        Name in the checkpoint's folder.
    offset, nbytes : int
        The bytes in that file; row-major, nothing else among them.
    span : int
        Bytes that each digest is of, but the last.
    digests : bytes
        8 bytes each, little-endian (`tensorspill.pool.digest`).
    """

    box: Box
    file: str
    offset: int
    nbytes: int
    span: int
    digests: bytes


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor of a checkpoint; its boxes cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[BoxRecord, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return sum(box.nbytes for box in self.boxes)


@dataclass(frozen=True, slots=True)
class ObjectRecord:
    """Where the bytes of a Python object are, and the digest of all of them."""

    file: str
    offset: int
    nbytes: int
    digest: int


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A file of a checkpoint.

    Attributes
    ----------
    name : str
        In the checkpoint's folder.
    nbytes : int
        Its exact length.
    header_bytes : int
        Where the data begins.
    header_digest : int
        Of the bytes before that.
    """

    name: str
    nbytes: int
    header_bytes: int
    header_digest: int


@dataclass(frozen=True, slots=True)
class Written:
    """What `write_file` wrote: for whoever makes the manifest.

    Attributes
    ----------
    file : FileRecord
    boxes : tuple of (str, torch.dtype, BoxRecord)
        Tensor, its dtype and where one part is, in the order of the file.
    objects : tuple of (str, ObjectRecord)
    seconds : float
        From the opening of the file to its fsync.
    reused : int
        Bytes of a removed checkpoint's extents that were written again.
    """

    file: FileRecord
    boxes: tuple[tuple[str, torch.dtype, BoxRecord], ...]
    objects: tuple[tuple[str, ObjectRecord], ...]
    seconds: float
    reused: int
