"""What the drive gives: the same engine and file, with large tensors and nothing else to do."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from tensorspill.spill.file import SpillFile

__all__ = ["DriveRate", "measure"]

_TENSORS = 4
_TENSOR_BYTES = 16 << 20
_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DriveRate:
    """Rates in bytes per second."""

    read: float
    write: float

    def of_mix(self, bytes_read: int, bytes_written: int) -> float:
        """Return the rate at which the drive would move so much of each, one after the other."""
        seconds = bytes_read / self.read + bytes_written / self.write
        return (bytes_read + bytes_written) / seconds if seconds else 0.0


def measure(spill: SpillFile) -> DriveRate:
    """Write and read large tensors, and return the medians of the rates.

    The first round, in which the file's blocks are written for the first time, doesn't count. What
    it stores is deleted again.
    """
    tensors = {
        f"rate {number}": torch.randint(0, 256, (_TENSOR_BYTES,), dtype=torch.uint8)
        for number in range(_TENSORS)
    }
    reads, writes = [], []
    for _ in range(_ROUNDS + 1):
        written = spill.put(tensors).result()
        reads.append(spill.get(tensors).result().gbps)
        writes.append(written.gbps)
        for name in tensors:
            spill.delete(name)
    return DriveRate(median(reads[1:]) * 1e9, median(writes[1:]) * 1e9)
