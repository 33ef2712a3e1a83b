"""The engines, and settings of them, that the suite runs on."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import tensorspill
from tensorspill.engine import Engine
from tests.conformance.memory import MEMORY

__all__ = ["LANES", "Lane", "for_host_memory", "for_tensors"]


@dataclass(frozen=True)
class Lane:
    """One way to open an engine; `open` takes a folder and further options."""

    name: str
    open: Callable[..., Engine]


def _lane(name: str, backend: str, **options: Any) -> Lane:
    engine = partial(tensorspill.open_engine, device=MEMORY.device, backend=backend, **options)
    return Lane(name, engine)


#: Small blocks and a short queue make short transfers cross every seam of the loop.
_HOST = [
    _lane("aio", "aio"),
    _lane("aio-seams", "aio", block_bytes=4096, depth=3),
    _lane("aio-threads", "aio", block_bytes=8192, depth=4, threads=3),
    _lane("aio-page-cache", "aio", block_bytes=8192, direct="no"),
]
_STAGED = [
    _lane("staged", "aio"),
]
_GDS = [
    _lane("gds", "gds"),
]

#: A process on a GPU, or on the stand-in for one, may be asked for some of them only.
_wanted = os.environ.get("TENSORSPILL_TEST_LANES")
LANES = [
    lane
    for lane in (_HOST if MEMORY.device == "cpu" else _STAGED + _GDS)
    if _wanted is None or lane.name in _wanted.split(",")
]

for_host_memory = pytest.mark.skipif(
    MEMORY.device != "cpu", reason="about host memory, which this engine does not serve"
)
for_tensors = pytest.mark.skipif(
    not MEMORY.tensors, reason="needs tensors, and torch has none of this memory"
)
