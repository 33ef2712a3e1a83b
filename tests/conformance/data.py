"""Fresh random content, poisoned destinations, and buffers at any address."""

import os
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from tensorspill.engine import Engine, File, Request
from tests.conformance.memory import MEMORY

#: What destinations hold before a read; content is random, so a byte left over shows.
POISON = 0xA5
GUARD = 64


def random_bytes(nbytes: int, shift: int = 0) -> Any:
    """Return `nbytes` of fresh random content at an address ≡ `shift` modulo 4096."""
    buffer = _at(nbytes, shift)[GUARD : GUARD + nbytes]
    fill(buffer, random_host_bytes(nbytes))
    return buffer


def random_host_bytes(nbytes: int) -> torch.Tensor:
    """Return fresh random content in host memory."""
    return torch.from_numpy(np.frombuffer(bytearray(os.urandom(nbytes)), "u1"))


def poisoned(nbytes: int, shift: int = 0) -> Any:
    """Return a destination with poison in it and `GUARD` bytes of poison on either side."""
    buffer = _at(nbytes, shift)
    fill(buffer, constant(nbytes + 2 * GUARD, POISON))
    return buffer[GUARD : GUARD + nbytes]


def constant(nbytes: int, value: int) -> torch.Tensor:
    """Return bytes in host memory, all of one value."""
    return torch.from_numpy(np.full(nbytes, value, "u1"))


def _at(nbytes: int, shift: int) -> Any:
    """Return `nbytes` and two guards, of which byte `GUARD` is at `shift` modulo 4096."""
    raw = MEMORY.empty(nbytes + 2 * GUARD + 4096)
    start = (shift - MEMORY.address(raw) - GUARD) % 4096
    return raw[start : start + nbytes + 2 * GUARD]


def guards_intact(buffer: Any) -> bool:
    """Whether the poison around a buffer from `poisoned` is still there."""
    whole = MEMORY.load(MEMORY.around(buffer, GUARD))
    return is_poison(whole[:GUARD]) and is_poison(whole[-GUARD:])


def is_poison(buffer: Any) -> bool:
    """Whether all of a buffer is as `poisoned` left it."""
    return bool((host(buffer).numpy() == POISON).all())


def host(buffer: Any) -> torch.Tensor:
    """Return a buffer's bytes in host memory; those of a host tensor are that tensor itself."""
    if isinstance(buffer, torch.Tensor) and buffer.is_cpu:
        return buffer
    return MEMORY.load(buffer)


def fill(buffer: Any, content: torch.Tensor) -> None:
    """Store bytes of host memory in a buffer."""
    if len(content):
        MEMORY.store(buffer, content)


def equal(one: Any, other: Any) -> bool:
    """Whether two buffers hold the same bytes."""
    # By numpy, in this thread: torch would wake all cores for each of thousands of small ones.
    return np.array_equal(host(one).numpy(), host(other).numpy())


def joined(buffers: Iterable[Any]) -> torch.Tensor:
    """Return the bytes of buffers one behind another, in host memory."""
    return torch.cat([host(buffer) for buffer in buffers])


def bytes_of(buffer: Any) -> bytes:
    """Return a buffer's bytes."""
    return host(buffer).numpy().tobytes()


def write(engine: Engine, file: File, buffer: Any, offset: int = 0) -> None:
    engine.submit([Request(buffer, file, offset, write=True)]).result()


def read(engine: Engine, file: File, nbytes: int, offset: int = 0) -> Any:
    destination = poisoned(nbytes)
    engine.submit([Request(destination, file, offset)]).result()
    return destination
