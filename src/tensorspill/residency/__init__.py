"""Blocks of a model whose parameters live in the spill file and visit memory when they are used."""

from tensorspill.residency.gradients import SpilledGradients
from tensorspill.residency.registry import residency_of
from tensorspill.residency.residency import Residency
from tensorspill.residency.statistics import Footprint, ResidencyStatistics, footprint

__all__ = [
    "Footprint",
    "Residency",
    "ResidencyStatistics",
    "SpilledGradients",
    "footprint",
    "residency_of",
]
