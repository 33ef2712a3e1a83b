"""What must hold after a fault."""

from __future__ import annotations

import os

import torch

from tensorspill.engine import Engine
from tests.conformance.data import random_bytes, read, write

__all__ = ["descriptors", "round_trip", "usable"]


def round_trip(engine: Engine, name: str, nbytes: int, shift: int = 0, offset: int = 0) -> bool:
    """Whether bytes written to a new file, from an address ≡ `shift`, come back the same."""
    content = random_bytes(nbytes, shift)
    with engine.open(name, "w") as file:
        write(engine, file, content, offset)
        back = read(engine, file, nbytes, offset)
    engine.remove(name)
    return torch.equal(back, content)


def usable(engine: Engine) -> bool:
    """Whether an engine moves bytes every way, and has nothing under way."""
    moved = all(round_trip(engine, "afterwards", 300_000, shift) for shift in (0, 3))
    return moved and engine.statistics().in_flight == 0


def descriptors() -> int:
    """How many this process has open."""
    return len(os.listdir("/proc/self/fd"))
