"""Digests of what is stored, computed beside the transfers and compared when it is read back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tensorspill.engine.statistics import TransferRecord
from tensorspill.engine.transfer import Transfer
from tensorspill.errors import CorruptError
from tensorspill.pool.kernels.digesting import begin_digests
from tensorspill.pool.live import live_ranges
from tensorspill.spill.items import Item
from tensorspill.spill.plans import Plan

__all__ = ["Digests", "keep"]


class Digests:
    """Computes digests in a thread of its own, which starts when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._executor: ThreadPoolExecutor | None = None

    def record(self, plan: Plan) -> Transfer:
        """Begin to compute the digests of what is put; the transfer ends when they are known.

        On a GPU they are computed after what the caller's stream is doing now, as the engine reads
        the memory after that; the thread only waits for them.
        """
        found = begin_digests([item.tensor for item in plan.items])
        transfer, token = Transfer(0), keep(plan)

        def work() -> None:
            try:
                for extent, value in zip(plan.extents, found.values(), strict=True):
                    extent.digest = value
            except BaseException as error:
                outcome: TransferRecord | BaseException = error
            else:
                outcome = TransferRecord(0, 0.0, {})
            live_ranges.remove(token)
            transfer.end(outcome)

        self.run(work)
        return transfer

    def compare(self, plan: Plan, path: str) -> CorruptError | None:
        """Return an error that names what was read and isn't what was put; waits for digests."""
        # What was read is there, whatever streams are doing.
        found = begin_digests([item.tensor for item in plan.items], after_current=False)
        triples = zip(plan.items, plan.extents, found.values(), strict=True)
        wrong = [item for item, extent, value in triples if value != extent.digest]
        return _corrupt(wrong, path) if wrong else None

    def run(self, work: Callable[[], None]) -> None:
        """Run `work` in the thread, or here if the interpreter is going down."""
        try:
            with self._lock:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(1, "tensorspill-digest")
            self._executor.submit(work)
        except RuntimeError:
            work()

    def close(self) -> None:
        """End the thread when it has done what it has; a second time does no harm."""
        if self._executor is not None:
            self._executor.shutdown()


def keep(plan: Plan) -> int:
    """Keep buffers of a plan from being released; return the token that `live_ranges` takes."""
    starts = np.array([item.address for item in plan.items], np.int64)
    sizes = np.array([item.nbytes for item in plan.items], np.int64)
    return live_ranges.add(starts, sizes)


def _corrupt(wrong: list[Item], path: str) -> CorruptError:
    names = ", ".join(repr(item.name) for item in wrong[:5])
    more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
    return CorruptError(
        f"The digests of {names}{more} differ: what was read is not what was put",
        names=(item.name for item in wrong),
        path=path,
        nbytes=sum(item.nbytes for item in wrong),
        remedy="Check the drive; the memory read into holds the wrong bytes",
    )
