"""Many tensors in one slab of memory, one after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tensorspill.errors import CapacityError, UnsupportedError
from tensorspill.pool.buffer import Buffer
from tensorspill.pool.kernels.casting import cast
from tensorspill.pool.sizes import round_up

__all__ = ["pack", "packed_bytes", "unpack", "views"]

#: What copy engines and vector loads want.
ALIGNMENT = 256


def pack(
    tensors: Sequence[torch.Tensor],
    slab: torch.Tensor | Buffer,
    dtype: torch.dtype | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> list[torch.Tensor]:
    """Write tensors one after the other into a slab, converted to `dtype`.

    Parameters
    ----------
    tensors : sequence of torch.Tensor
        Of any shapes, dtypes and layouts. See `casting.cast` for conversions and for streams.
    slab : torch.Tensor or Buffer
        Contiguous memory of at least `packed_bytes`, which shares none with the tensors. What lies
        between the packed tensors is left as it is.
    dtype : torch.dtype, optional
        What to convert to; without it each tensor keeps its own.
    alignment : int
        Each tensor begins at a multiple of it in the slab; a multiple of the item sizes.

    Returns
    -------
    list of torch.Tensor
        The packed tensors: views of the slab in the shapes of the tensors.

    Raises
    ------
    CapacityError
        The slab is too small; nothing was written.
    UnsupportedError
        The slab is not contiguous, or an alignment does not fit; nothing was written.
    """
    packed = views(tensors, slab, dtype, alignment=alignment)
    cast(tensors, packed)
    return packed


def unpack(
    slab: torch.Tensor | Buffer,
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> None:
    """Write what `pack` made of such tensors back into them.

    Parameters
    ----------
    slab : torch.Tensor or Buffer
        As it was packed.
    tensors : sequence of torch.Tensor
        Where to; in the order and with the numbers of elements of those that were packed.
    dtype : torch.dtype, optional
        What they were converted to; without it each was packed in the dtype that it has here.
    alignment : int
        As it was packed.

    Raises
    ------
    CapacityError, UnsupportedError
        As `pack` does.
    """
    cast(views(tensors, slab, dtype, alignment=alignment), tensors)


def packed_bytes(
    tensors: Sequence[torch.Tensor],
    dtype: torch.dtype | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> int:
    """Return the bytes of a slab that `pack` needs."""
    return _offsets(tensors, dtype, alignment)[1]


def views(
    tensors: Sequence[torch.Tensor],
    slab: torch.Tensor | Buffer,
    dtype: torch.dtype | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> list[torch.Tensor]:
    """Return where `pack` puts tensors, without moving anything."""
    memory = slab.tensor if isinstance(slab, Buffer) else slab
    if not memory.is_contiguous():
        raise UnsupportedError("The slab is not contiguous")
    flat = memory.detach().reshape(-1).view(torch.uint8)
    offsets, needed = _offsets(tensors, dtype, alignment)
    if needed > flat.nbytes:
        raise CapacityError(
            "The slab is too small for the tensors",
            asked=needed,
            free=flat.nbytes,
            largest=flat.nbytes,
        )
    found = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        kind = dtype or tensor.dtype
        part = flat[offset : offset + tensor.numel() * kind.itemsize]
        try:
            found.append(part.view(kind).view(tensor.shape))
        except RuntimeError as error:
            raise UnsupportedError(
                f"A slab at this address has no place for {kind}: {error}"
            ) from error
    return found


def _offsets(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype | None, alignment: int
) -> tuple[list[int], int]:
    """Return where each tensor begins, and where the last one ends."""
    offsets, end = [], 0
    for tensor in tensors:
        itemsize = (dtype or tensor.dtype).itemsize
        if alignment < 1 or alignment % itemsize:
            raise UnsupportedError(
                f"An alignment must be a multiple of the item size {itemsize}, not {alignment}"
            )
        offsets.append(round_up(end, alignment))
        end = offsets[-1] + tensor.numel() * itemsize
    return offsets, end
