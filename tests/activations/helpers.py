"""What the tests of activation spilling share."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tensorspill.activations import ActivationSpill
from tensorspill.pool import BufferPool
from tests.pool.helpers import check_pool
from tests.spill.helpers import check_spill

Function = Callable[[], torch.Tensor]


@contextmanager
def spilling(folder: Any, **options: Any) -> Iterator[ActivationSpill]:
    """Open a spill of little memory that takes everything; in the end, check that all is back."""
    settings: dict[str, Any] = {"min_bytes": 1, "budget": "32KiB"} | options
    spill = ActivationSpill(folder, **settings)
    spill._traffic.pool.close()
    spill._traffic.pool = BufferPool(spill._traffic.pool.capacity, page_lock="no", poison=True)
    try:
        yield spill
        check_free(spill)
    finally:
        spill.close()


def check_free(spill: ActivationSpill) -> None:
    """Check that nothing is kept of a graph that is gone, in memory or on the drive."""
    gc.collect()
    traffic = spill._traffic
    traffic.writing.finish()
    traffic.sweep()  # cancels what is under way, and ...
    traffic.writing.finish()
    traffic.sweep()  # ... comes back to it
    assert traffic.live_bytes == 0
    assert traffic.writing.idle
    assert list(traffic.file) == []
    deadline = time.monotonic() + 60
    while traffic.pool.statistics().allocated and time.monotonic() < deadline:
        time.sleep(0.001)  # what was read ahead for a backward that failed is still coming
    assert traffic.pool.statistics().allocated == 0
    assert not traffic._ranges
    check_pool(traffic.pool)
    check_spill(traffic.file)


def gradients(loss: torch.Tensor, inputs: Any, **options: Any) -> list[Any]:
    return list(torch.autograd.grad(loss, list(inputs), allow_unused=True, **options))


def same(ours: Any, theirs: Any) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(ours, theirs, strict=True)
    )
