"""Options of the host engine that keep its own memory small beside a small budget."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["modest"]

_LARGEST, _SMALLEST = 1 << 20, 1 << 17
#: Blocks that the engine stages at a time with its default depth.
_BLOCKS = 16
#: Staging may take so small a part of a budget.
_PART = 16


def modest(budget: int, device: str | torch.device, options: dict[str, Any]) -> dict[str, Any]:
    """Return options with smaller blocks where staging would be much of a budget.

    Only for host memory, and where the user asked for no size. Below some 256 MiB the blocks are
    smaller than those with which drives are fastest.

    Parameters
    ----------
    budget : int
        Bytes.
    device : str or torch.device
        Of the tensors.
    options : dict
        Of `open_engine`, ``backend`` included.
    """
    block = _LARGEST
    while block > _SMALLEST and block * _BLOCKS * _PART > budget:
        block //= 2
    ours = torch.device(device).type == "cpu" and options.get("backend", "auto") in ("auto", "aio")
    if not ours or block == _LARGEST or "block_bytes" in options:
        return options
    return {**options, "block_bytes": block}
