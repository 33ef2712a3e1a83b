"""The engines, and settings of them, that the suite runs on."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorspill
from tensorspill.engine import Engine


@dataclass(frozen=True)
class Lane:
    """One way to open an engine; `open` takes a folder and further options."""

    name: str
    open: Callable[..., Engine]


def _aio(name: str, **options: Any) -> Lane:
    return Lane(name, partial(tensorspill.open_engine, backend="aio", **options))


#: Small blocks and a short queue make short transfers cross every seam of the loop.
LANES = [
    _aio("aio"),
    _aio("aio-seams", block_bytes=4096, depth=3),
    _aio("aio-threads", block_bytes=8192, depth=4, threads=3),
    _aio("aio-page-cache", block_bytes=8192, direct="no"),
]
