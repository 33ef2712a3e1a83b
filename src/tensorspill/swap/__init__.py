"""The parameter swapper: parameters that live in a spill file and visit a budget of memory."""

from tensorspill.swap.entries import Swappable
from tensorspill.swap.status import SwapperStatistics, SwapStatus
from tensorspill.swap.swapper import ParameterSwapper

__all__ = ["ParameterSwapper", "SwapStatus", "Swappable", "SwapperStatistics"]
