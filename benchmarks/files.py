"""Spill files to measure with: written once, so that no run pays for the first touch."""

from __future__ import annotations

from tensorspill.profiling.files import prewrite
from tensorspill.spill.file import SpillFile

__all__ = ["prewrite_spill"]


def prewrite_spill(spill: SpillFile) -> None:
    """Write all blocks of a spill file that holds nothing yet."""
    for path in spill.paths:
        prewrite(path)
