"""What an engine did: frozen records of bytes, operations and seconds by the path taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from tensorspill.engine.latencies import Latencies

__all__ = ["EngineStatistics", "PathStatistics", "TransferRecord"]


@dataclass(frozen=True, slots=True)
class PathStatistics:
    """What went one path.

    Attributes
    ----------
    nbytes : int
        Bytes of the callers' buffers. Over all paths these add up to the bytes asked for.
    io_bytes : int
        Bytes that the drive or file system was asked to move, padding included.
    operations : int
        Input/output operations.
    seconds : float
        Time during which at least one operation of this path was under way.
    slowest : float
        Seconds that the slowest operation took; of a drive that slows down in the middle, this
        grows while `seconds` per operation may not.
    why : str
        Why these bytes took this path.
    latencies : Latencies
        Of the operations, as far as the engine times each.
    """

    nbytes: int = 0
    io_bytes: int = 0
    operations: int = 0
    seconds: float = 0.0
    slowest: float = 0.0
    why: str = ""
    latencies: Latencies = field(default_factory=Latencies)

    def __add__(self, other: PathStatistics) -> PathStatistics:
        return PathStatistics(
            self.nbytes + other.nbytes,
            self.io_bytes + other.io_bytes,
            self.operations + other.operations,
            self.seconds + other.seconds,
            max(self.slowest, other.slowest),
            self.why or other.why,
            self.latencies + other.latencies,
        )


@dataclass(frozen=True, slots=True)
class TransferRecord:
    """What one transfer did; the result of its future.

    Attributes
    ----------
    nbytes : int
        Bytes moved: all that was asked for, or the future raises instead.
    seconds : float
        From `submit` to the last completion.
    by_path : mapping of str to int
        `nbytes` divided among the paths taken.
    """

    nbytes: int
    seconds: float
    by_path: Mapping[str, int]

    @property
    def gbps(self) -> float:
        """Rate in GB/s (decimal)."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class EngineStatistics:
    """What an engine did since it was opened.

    Attributes
    ----------
    engine, folder, device : str
        Which engine, where.
    options : mapping of str to (value, source)
        The options in force; source is "argument", "environment", "tuned" or "default".
    transfers, failures, cancelled, in_flight : int
        Batches submitted; of these failed, cancelled, not yet ended.
    requests : int
        Requests in those batches.
    bytes_read, bytes_written : int
        Bytes of callers' buffers moved by transfers that ended well.
    by_path : mapping of str to PathStatistics
        Of all operations that succeeded, those of failed transfers included.
    staging_bytes : int
        Memory that the engine itself holds.
    fallbacks : int
        Files that went on by another engine, since this one's way failed on them.
    notes : tuple of str
        Limits met and what the engine did about them.
    """

    engine: str
    folder: str
    device: str
    options: Mapping[str, tuple[Any, str]]
    transfers: int = 0
    failures: int = 0
    cancelled: int = 0
    in_flight: int = 0
    requests: int = 0
    bytes_read: int = 0
    bytes_written: int = 0
    by_path: Mapping[str, PathStatistics] = field(default_factory=lambda: MappingProxyType({}))
    staging_bytes: int = 0
    fallbacks: int = 0
    notes: tuple[str, ...] = ()
