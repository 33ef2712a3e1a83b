"""Optimizer states that live on the drive."""

from tensorspill.optimizer.clipping import clip_grad_norm_
from tensorspill.optimizer.optimizer import SpilledOptimizer
from tensorspill.optimizer.state_dicts import ParameterState, StateSource
from tensorspill.optimizer.statistics import OptimizerStatistics

__all__ = [
    "OptimizerStatistics",
    "ParameterState",
    "SpilledOptimizer",
    "StateSource",
    "clip_grad_norm_",
]
