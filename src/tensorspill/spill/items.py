"""What users hand to a spill file, checked: names, tensors, bytes and addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.buffer import Buffer

__all__ = ["Item", "Tensors", "check_items", "check_overlaps"]

Tensors = Mapping[str, torch.Tensor | Buffer]


class Item(NamedTuple):
    """A tensor that is to be stored, or to be read into.

    `tensor` is a buffer itself where torch has no tensors of its memory.
    """

    name: str
    tensor: torch.Tensor
    nbytes: int
    address: int


def check_items(tensors: Tensors, device: torch.device, *, only_tensors: bool) -> list[Item]:
    """Return what is to be moved.

    Parameters
    ----------
    tensors : mapping of str to torch.Tensor or Buffer
    device : torch.device
        Where they have to be.
    only_tensors : bool
        Refuse buffers of GPU memory where torch has no CUDA.

    Raises
    ------
    UnsupportedError
        Something is no tensor, not contiguous, without memory, or on another device.
    ClosedError
        A buffer was released.
    """
    if not isinstance(tensors, Mapping):
        raise UnsupportedError(f"Tensors come as a mapping of their names, not as {type(tensors)}")
    host = device.type == "cpu"
    items = []
    for name, value in tensors.items():
        if not (host or only_tensors) and isinstance(value, Buffer) and not value.has_tensor:
            items.append(_bare(name, value, device))
            continue
        tensor = value if isinstance(value, torch.Tensor) else _tensor_of(name, value)
        if (
            not (tensor.is_cpu if host else tensor.device == device)
            or tensor.layout is not torch.strided
            or not tensor.is_contiguous()
            or tensor.is_neg()
            or tensor.is_conj()
            or not isinstance(name, str)
        ):
            raise _unsuitable(name, tensor, device)
        nbytes, address = tensor.nbytes, tensor.data_ptr()
        if nbytes and not address:
            raise UnsupportedError(f"Tensor {name!r} has no memory", nbytes=nbytes)
        items.append(Item(name, tensor, nbytes, address))
    return items


def check_overlaps(items: Sequence[Item]) -> None:
    """Refuse two destinations that share memory.

    An engine finds those in its own part of a batch; this is for batches of several engines.

    Raises
    ------
    UnsupportedError
        Two tensors overlap.
    """
    reach, last = 0, ""
    for address, nbytes, name in sorted((i.address, i.nbytes, i.name) for i in items if i.nbytes):
        if address < reach:
            raise UnsupportedError(f"The destinations {last!r} and {name!r} overlap")
        reach, last = address + nbytes, name


def _tensor_of(name: object, value: Any) -> torch.Tensor:
    if isinstance(value, Buffer):
        return value.tensor
    raise UnsupportedError(f"{name!r} is a {type(value).__name__}, no tensor and no buffer")


def _bare(name: str, buffer: Buffer, device: torch.device) -> Item:
    """Return the item of a buffer without a tensor, which has all that matters of one."""
    _ = buffer.memory
    if not isinstance(name, str) or buffer.device != device:
        raise _unsuitable(name, cast(torch.Tensor, buffer), device)
    return Item(name, cast(torch.Tensor, buffer), buffer.nbytes, buffer.address)


def _unsuitable(name: object, tensor: torch.Tensor, device: torch.device) -> UnsupportedError:
    if not isinstance(name, str):
        return UnsupportedError(f"A name is a string, not {name!r}")
    if tensor.device != device:
        return UnsupportedError(
            f"Tensor {name!r} is on {tensor.device}, the spill file serves {device}"
        )
    if tensor.layout is not torch.strided:
        return UnsupportedError(f"Tensor {name!r} has the layout {tensor.layout}")
    if not tensor.is_contiguous():
        return UnsupportedError(
            f"Tensor {name!r} is not contiguous", remedy="Use a contiguous copy"
        )
    return UnsupportedError(
        f"Tensor {name!r} is a lazy conjugate or negative, its memory holds something else",
        remedy="Use resolve_conj() or resolve_neg()",
    )
