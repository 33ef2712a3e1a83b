"""The spill file: named tensors in one preallocated file for each drive."""

from tensorspill.spill.file import SpillFile
from tensorspill.spill.records import Location, SpillStatistics, StoredTensor

__all__ = ["Location", "SpillFile", "SpillStatistics", "StoredTensor"]
