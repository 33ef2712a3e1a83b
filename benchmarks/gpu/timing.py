"""Timing work on a GPU, between two events of its stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.gpu.check import Check

__all__ = ["device_seconds"]

#: Copies that keep the GPU busy while the host queues what is timed.
_LEAD_SECONDS = 0.05
_LARGE = 256 << 20


def device_seconds(check: Check, work: Callable[[], object]) -> float:
    """Return the seconds that work takes on the GPU, the host's part of it left out.

    The work is queued behind copies that take longer than the queueing. Without a GPU it is the
    seconds that the call takes.
    """
    if check.device.type != "cuda":
        begun = time.perf_counter()
        work()
        return max(time.perf_counter() - begun, 1e-9)
    source = torch.empty(_LARGE, dtype=torch.uint8, device=check.device)
    target = torch.empty_like(source)
    make: Any = torch.cuda.Event
    before, after, whole = (make(enable_timing=True) for _ in range(3))
    check.synchronize()
    whole.record()
    target.copy_(source)
    before.record()
    before.synchronize()
    each = max(whole.elapsed_time(before) / 1e3, 1e-5)
    for _ in range(min(int(_LEAD_SECONDS / each) + 1, 2000)):
        target.copy_(source)
    before.record()
    work()
    after.record()
    after.synchronize()
    return max(float(before.elapsed_time(after)) / 1e3, 1e-9)
