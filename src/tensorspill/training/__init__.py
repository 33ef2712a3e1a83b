"""Models larger than memory: `offload` and `init`."""

from tensorspill.training.blocks import find_blocks
from tensorspill.training.budget import smallest_budget
from tensorspill.training.building import init
from tensorspill.training.handle import Offloaded, SpilledState, offloaded
from tensorspill.training.loading import load_safetensors
from tensorspill.training.offloading import offload

__all__ = [
    "Offloaded",
    "SpilledState",
    "find_blocks",
    "init",
    "load_safetensors",
    "offload",
    "offloaded",
    "smallest_budget",
]
