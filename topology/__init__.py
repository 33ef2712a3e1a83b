"""Machine topology: which rank sits near which GPU, NIC, drive and socket.

This sub-package stands alone: of tensorspill it imports only the errors.
"""

from __future__ import annotations

from tensorspill.topology.affinity import Affinity, affinities
from tensorspill.topology.binding import bind_process, bind_thread, bound
from tensorspill.topology.discovery import Storage, device_of, discover
from tensorspill.topology.distances import Distance, distance, nearest
from tensorspill.topology.folders import nearest_folder
from tensorspill.topology.machine import (
    Bridge,
    Drive,
    Gpu,
    Machine,
    Mig,
    Mount,
    Nic,
    NumaNode,
    NvLink,
    Socket,
    Stack,
)
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.cluster_placement import place_on
from tensorspill.topology.ranks.gathering import gather_ranks, this_rank
from tensorspill.topology.ranks.grid import ParallelLayout, RankGrid
from tensorspill.topology.ranks.launch import LaunchedRank, launched
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.ranks.rank_table import RankRecord, RankTable
from tensorspill.topology.writers.model_state import model_state
from tensorspill.topology.writers.plan import WriterPlan
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.selection import WriterShare, select_writers
from tensorspill.topology.writers.slices import Atom, Slice, Slices

__all__ = [
    "Affinity",
    "Atom",
    "Bridge",
    "Capacities",
    "Distance",
    "Drive",
    "Gpu",
    "LaunchedRank",
    "Machine",
    "Mig",
    "Mount",
    "Nic",
    "NumaNode",
    "NvLink",
    "ParallelLayout",
    "Placement",
    "RankGrid",
    "RankRecord",
    "RankTable",
    "Slice",
    "Slices",
    "Socket",
    "Stack",
    "Storage",
    "Unit",
    "WriterPlan",
    "WriterShare",
    "affinities",
    "bind_process",
    "bind_thread",
    "bound",
    "device_of",
    "discover",
    "distance",
    "gather_ranks",
    "launched",
    "model_state",
    "nearest",
    "nearest_folder",
    "place_on",
    "plan_writers",
    "select_writers",
    "this_rank",
]
