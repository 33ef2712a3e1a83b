"""Copies between GPU memory and staging blocks, many in one call of the driver."""

from __future__ import annotations

import threading
import time
from typing import Any

from tensorspill.engine.latencies import Latencies
from tensorspill.engine.statistics import PathStatistics
from tensorspill.errors import UnsupportedError
from tensorspill.pool.cuda.driver import call, error_for, status, version
from tensorspill.pool.cuda.streams import Event, Stream

__all__ = ["Copier", "Meter"]

#: Version of the driver that has batched copies.
_BATCHES = 12080

#: Times of copies that are kept before they are sorted into the histogram.
_RECENT = 256

#: Codes by which a driver or a GPU says that it has none after all.
_NO_BATCHES = ("CUDA_ERROR_NOT_SUPPORTED", "CUDA_ERROR_NOT_FOUND")


class Meter:
    """Counts copies: how many bytes, how long each took, how long any was under way."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._nbytes = self._count = self._under_way = 0
        self._since = self._seconds = self._slowest = 0.0
        self._latencies, self._recent = Latencies(), list[float]()

    def began(self) -> float:
        """Count a copy in; return the time, for `ended`."""
        now = time.perf_counter()
        with self._lock:
            if self._under_way == 0:
                self._since = now
            self._under_way += 1
        return now

    def ended(self, begun: float, nbytes: int) -> None:
        """Count a copy out."""
        now = time.perf_counter()
        with self._lock:
            self._under_way -= 1
            if self._under_way == 0:
                self._seconds += now - self._since
            self._slowest = max(self._slowest, now - begun)
            self._nbytes += nbytes
            self._count += 1
            self._recent.append(now - begun)
            if len(self._recent) >= _RECENT:
                self._fold()

    def statistics(self) -> PathStatistics | None:
        """Return what was counted, or None without any copy."""
        now = time.perf_counter()
        with self._lock:
            if not self._count:
                return None
            self._fold()
            running = now - self._since if self._under_way else 0.0
            return PathStatistics(
                io_bytes=self._nbytes,
                operations=self._count,
                seconds=self._seconds + running,
                slowest=self._slowest,
                why="between GPU memory and page-locked blocks",
                latencies=self._latencies,
            )

    def _fold(self) -> None:
        self._latencies += Latencies.of(self._recent)
        self._recent.clear()


class Copier:
    """Puts copies on a stream of its own; used by one thread, with the context current.

    Parameters
    ----------
    device : int
        Number of the GPU.
    """

    def __init__(self, device: int) -> None:
        self._stream = Stream(device)
        self._batches = version() >= _BATCHES
        self._attributes: list[Any] = []

    def copy(
        self, destinations: list[int], sources: list[int], sizes: list[int], done: Event
    ) -> None:
        """Begin to copy ranges that do not overlap, and record `done` behind them.

        Raises
        ------
        SpillError
            The driver refused or the GPU failed; some of the copies may be under way.
        """
        if len(sizes) == 1 or not (self._batches and self._batch(destinations, sources, sizes)):
            for destination, source, nbytes in zip(destinations, sources, sizes, strict=True):
                call("cuMemcpyAsync", destination, source, nbytes, self._stream.handle)
        done.record(self._stream.handle)

    def synchronize(self) -> None:
        """Wait for all copies."""
        self._stream.synchronize()

    def close(self) -> None:
        """Give up the stream; a second time does no harm."""
        self._stream.close()

    def _batch(self, destinations: list[int], sources: list[int], sizes: list[int]) -> bool:
        """Begin all in one call; False where that does not exist, from then on."""
        try:
            from cuda.bindings.driver import CUdeviceptr

            code, _ = status(
                "cuMemcpyBatchAsync",
                list(map(CUdeviceptr, destinations)),
                list(map(CUdeviceptr, sources)),
                sizes,
                len(sizes),
                self._attributes_of_all(),
                [0],
                1,
                self._stream.handle,
            )
        except UnsupportedError:
            code = _NO_BATCHES[0]
        if code in _NO_BATCHES:
            self._batches = False
            return False
        if code is not None:
            raise error_for("cuMemcpyBatchAsync", code)
        return True

    def _attributes_of_all(self) -> list[Any]:
        """Return that sources are read in the order of the stream."""
        if not self._attributes:
            from cuda.bindings.driver import CUmemcpyAttributes, CUmemcpySrcAccessOrder

            order = CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            attributes = CUmemcpyAttributes()
            attributes.srcAccessOrder = order
            self._attributes.append(attributes)
        return self._attributes
