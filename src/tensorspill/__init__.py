"""Move tensors between GPU or host memory and NVMe at the speed of the drives.

Importing this package starts nothing and imports its parts only when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorspill.activations import activation_spill
    from tensorspill.engine import Engine, File, Request, Transfer
    from tensorspill.opening import choose_engine, open_engine
    from tensorspill.optimizer import SpilledOptimizer
    from tensorspill.pool import Buffer, BufferPool
    from tensorspill.spill import SpillFile
    from tensorspill.swap import ParameterSwapper, SwapStatus
    from tensorspill.training import init, offload, offloaded

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "BufferPool",
    "Engine",
    "File",
    "ParameterSwapper",
    "Request",
    "SpillFile",
    "SpilledOptimizer",
    "SwapStatus",
    "Transfer",
    "activation_spill",
    "choose_engine",
    "errors",
    "init",
    "offload",
    "offloaded",
    "open_engine",
]

_WHERE = {
    "Buffer": "tensorspill.pool",
    "BufferPool": "tensorspill.pool",
    "Engine": "tensorspill.engine",
    "File": "tensorspill.engine",
    "ParameterSwapper": "tensorspill.swap",
    "Request": "tensorspill.engine",
    "SpillFile": "tensorspill.spill",
    "SpilledOptimizer": "tensorspill.optimizer",
    "SwapStatus": "tensorspill.swap",
    "Transfer": "tensorspill.engine",
    "activation_spill": "tensorspill.activations",
    "choose_engine": "tensorspill.opening",
    "init": "tensorspill.training",
    "offload": "tensorspill.training",
    "offloaded": "tensorspill.training",
    "open_engine": "tensorspill.opening",
}

#: Sub-packages that are used by their names: ``tensorspill.checkpoint.save``.
_PARTS = frozenset(
    {
        "checkpoint",
        "deepspeed",
        "engine",
        "errors",
        "gds",
        "host_fallback",
        "pool",
        "profiling",
        "timeline",
        "topology",
    }
)


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(importlib.import_module(_WHERE[name]), name)
    if name in _PARTS:
        return importlib.import_module(f"tensorspill.{name}")
    raise AttributeError(f"module 'tensorspill' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """Give notebooks ``%spill_stats`` (``%load_ext tensorspill``)."""
    importlib.import_module("tensorspill.profiling.notebook").load(shell)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__, *_PARTS])
