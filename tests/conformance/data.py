"""Fresh random content, poisoned destinations, and buffers at any address."""

import os

import numpy as np
import torch

from tensorspill.engine import Engine, File, Request

#: What destinations hold before a read; content is random, so a byte left over shows.
POISON = 0xA5
GUARD = 64


def random_bytes(nbytes: int, shift: int = 0) -> torch.Tensor:
    """Return `nbytes` of fresh random content at an address ≡ `shift` modulo 4096."""
    tensor = _at(nbytes, shift)[GUARD : GUARD + nbytes]
    tensor.numpy()[:] = np.frombuffer(os.urandom(nbytes), "u1")
    return tensor


def poisoned(nbytes: int, shift: int = 0) -> torch.Tensor:
    """Return a destination with poison in it and `GUARD` bytes of poison on either side."""
    tensor = _at(nbytes, shift)
    tensor.fill_(POISON)
    return tensor[GUARD : GUARD + nbytes]


def _at(nbytes: int, shift: int) -> torch.Tensor:
    """Return `nbytes` and two guards, of which byte `GUARD` is at `shift` modulo 4096."""
    raw = torch.empty(nbytes + 2 * GUARD + 4096, dtype=torch.uint8)
    start = (shift - raw.data_ptr() - GUARD) % 4096
    return raw[start : start + nbytes + 2 * GUARD]


def guards_intact(tensor: torch.Tensor) -> bool:
    """Whether the poison around a tensor from `poisoned` is still there."""
    start = tensor.storage_offset() - GUARD
    whole = tensor.as_strided((tensor.numel() + 2 * GUARD,), (1,), start)
    return bool((whole[:GUARD] == POISON).all() and (whole[-GUARD:] == POISON).all())


def write(engine: Engine, file: File, tensor: torch.Tensor, offset: int = 0) -> None:
    engine.submit([Request(tensor, file, offset, write=True)]).result()


def read(engine: Engine, file: File, nbytes: int, offset: int = 0) -> torch.Tensor:
    destination = poisoned(nbytes)
    engine.submit([Request(destination, file, offset)]).result()
    return destination
