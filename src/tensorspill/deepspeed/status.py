"""Whether a partitioned parameter is in memory: DeepSpeed's states, under its names."""

from __future__ import annotations

import sys
from enum import Enum
from typing import Any

__all__ = ["PartitionedParamStatus", "status_type"]

_MODULE = "deepspeed.runtime.swap_tensor.partitioned_param_swapper"


class PartitionedParamStatus(Enum):
    """In memory; on the drive; on its way to memory."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def status_type() -> Any:
    """Return DeepSpeed's own type where it is loaded: it compares statuses by identity."""
    return getattr(sys.modules.get(_MODULE), "PartitionedParamStatus", PartitionedParamStatus)
