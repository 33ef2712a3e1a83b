"""Activations: saved tensors that go to the drive in forward and come back ahead of backward."""

from tensorspill.activations.spill import ActivationSpill, activation_spill
from tensorspill.activations.statistics import ActivationStatistics

__all__ = ["ActivationSpill", "ActivationStatistics", "activation_spill"]
