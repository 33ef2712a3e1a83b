"""The engines, and settings of them, that the suite runs on."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

import tensorspill
from tensorspill.engine import Engine
from tests.conformance.memory import LANE_VARIABLE, MEMORY

__all__ = ["LANES", "REAL_CUFILE", "STREAMED", "Lane", "for_host_memory", "for_tensors"]

#: Whether the process runs on the real cuFile, without a GPU.
REAL_CUFILE = os.environ.get(LANE_VARIABLE) == "real"


@dataclass(frozen=True)
class Lane:
    """One way to open an engine.

    Attributes
    ----------
    name : str
    open : callable
        Takes a folder and further options.
    much : int
        Bytes whose transfer takes the engine a while.
    """

    name: str
    open: Callable[..., Engine]
    much: int = 64 << 20


def _lane(name: str, backend: str, **options: Any) -> Lane:
    engine = partial(tensorspill.open_engine, device=MEMORY.device, backend=backend, **options)
    return Lane(name, engine, 8 << 20 if name.endswith("seams") else 64 << 20)


#: Small blocks and a short queue make short transfers cross every seam of the loop.
_HOST = [
    _lane("aio", "aio"),
    _lane("aio-seams", "aio", block_bytes=4096, depth=3),
    _lane("aio-threads", "aio", block_bytes=8192, depth=4, threads=3),
    _lane("aio-page-cache", "aio", block_bytes=8192, direct="no"),
]
_GDS = _lane("gds", "gds")
_STAGED = _lane("staged", "aio")
_SMALL = {"block_bytes": 20_480, "depth": 3, "staging_block": 40_960, "staging_bytes": 81_920}

#: What runs in each lane of `tests.standin`, and on a GPU (None). The host path does not depend on
#: the lane, so two have different settings of it.
_DEVICE = {
    None: [_GDS, _STAGED],
    "compat": [_GDS, _STAGED],
    "cufile": [
        _GDS,
        _lane("gds-seams", "gds", block_bytes=20_480, depth=3, threads=2, threshold_bytes=8192),
        _lane("gds-ordered", "gds", stream_ordered="yes", registered_bytes=0),
    ],
    "real": [_GDS, _lane("staged-seams", "aio", **_SMALL)],
}

#: Names of those to run, if not all: for a GPU without GPUDirect Storage, say.
_wanted = os.environ.get("TENSORSPILL_TEST_LANES")

LANES = [
    lane
    for lane in (_HOST if MEMORY.device == "cpu" else _DEVICE[os.environ.get(LANE_VARIABLE)])
    if _wanted is None or lane.name in _wanted.split(",")
]

#: Lanes whose batches may be on streams of cuFile's as soon as they are submitted.
STREAMED = {"gds", "gds-ordered"} if os.environ.get(LANE_VARIABLE) == "cufile" else set[str]()

for_host_memory = pytest.mark.skipif(
    MEMORY.device != "cpu", reason="about host memory, which this engine does not serve"
)
for_tensors = pytest.mark.skipif(
    not MEMORY.tensors, reason="needs tensors, and torch has none of this memory"
)
