"""Pictures of measurements: the same functions for notebooks, the command line and reports.

Each draws into the axes that it is given, or into a figure of its own, and returns the figure.
Rates are in decimal GB/s, sizes of blocks in binary units.
"""

from tensorspill.profiling.pictures.affinity import affinity_matrix
from tensorspill.profiling.pictures.bars import limits
from tensorspill.profiling.pictures.drawing import data_uri, save
from tensorspill.profiling.pictures.heat import heat_map
from tensorspill.profiling.pictures.plans import writer_plans
from tensorspill.profiling.pictures.roof import roofline
from tensorspill.profiling.pictures.steady import steady_state
from tensorspill.profiling.pictures.steps import overlap
from tensorspill.profiling.pictures.tail import latency_tail
from tensorspill.profiling.pictures.together import draw_results, overview

__all__ = [
    "affinity_matrix",
    "data_uri",
    "draw_results",
    "heat_map",
    "latency_tail",
    "limits",
    "overlap",
    "overview",
    "roofline",
    "save",
    "steady_state",
    "writer_plans",
]
