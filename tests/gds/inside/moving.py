"""Fresh random content on the GPU, poisoned destinations, and an engine to move them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tensorspill.engine import Engine, File, Request
from tensorspill.engine.options import resolve
from tensorspill.gds import GdsEngine, GdsOptions
from tests.standin.arrays import DeviceArray

__all__ = ["content", "fresh", "gds", "holds", "host_path", "poisoned", "read", "write"]

POISON = 0xA5
GUARD = 64


def gds(folder: Path, host: Callable[[], Engine] | None = None, **options: Any) -> GdsEngine:
    """Open the engine as ``backend="gds"`` does, or with a host path beside it."""
    return GdsEngine(folder, torch.device("cuda:0"), resolve(GdsOptions, options), host)


def host_path(folder: Path) -> Callable[[], Engine]:
    """Return what opens a host path: kvikio's own, which never calls cuFile."""
    return lambda: gds(folder, compat="yes")


def content(nbytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(os.urandom(nbytes), "u1")


def fresh(nbytes: int, shift: int = 0) -> tuple[DeviceArray, NDArray[np.uint8]]:
    """Return random content, in GPU memory at an address ≡ `shift` modulo 4096 and here."""
    array, data = _at(nbytes, shift), content(nbytes)
    array.store(data)
    return array, data


def poisoned(nbytes: int, shift: int = 0) -> DeviceArray:
    """Return a destination with poison in it, and `GUARD` bytes of it on either side."""
    array = _at(nbytes, shift)
    _whole(array).store(np.full(nbytes + 2 * GUARD, POISON, "u1"))
    return array


def holds(array: DeviceArray, data: NDArray[np.uint8]) -> bool:
    """Whether a destination from `poisoned` holds `data`, and the poison beside it is intact."""
    whole = _whole(array).load()
    guards = np.concatenate([whole[:GUARD], whole[-GUARD:]])
    return bool((guards == POISON).all()) and np.array_equal(whole[GUARD:-GUARD], data)


def write(engine: Engine, file: File, array: DeviceArray, offset: int = 0) -> None:
    engine.submit([Request(array, file, offset, write=True)]).result()


def read(engine: Engine, file: File, nbytes: int, offset: int = 0) -> NDArray[np.uint8]:
    array = poisoned(nbytes)
    engine.submit([Request(array, file, offset)]).result()
    return array.load()


def _at(nbytes: int, shift: int) -> DeviceArray:
    raw = DeviceArray(nbytes + 2 * GUARD + 2 * 4096)
    start = (shift - raw.address - GUARD) % 4096 + GUARD
    return raw[start : start + nbytes]


def _whole(array: DeviceArray) -> DeviceArray:
    """Return a view of an array and its guards, which lie in the same allocation."""
    whole = array[0:0]
    whole.address, whole.nbytes = array.address - GUARD, array.nbytes + 2 * GUARD
    return whole
