"""Ranks on known machines, and which of what they share can be planned with."""

import numpy as np
import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.topology.machines import cluster, names
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.cluster_placement import STORAGE, place_on
from tensorspill.topology.ranks.nesting import Level, nest
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.solver.forest import Forest
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.slices import Slice
from tests.topology.writers.plans import check_plan


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("name", names())
def test_every_known_machine_can_be_planned_for(name: str, storage: str) -> None:
    machines = cluster(name, 3)
    if name == "adversarial" and storage == "socket":  # which has a socket without drives
        with pytest.raises(UnsupportedError, match="local rank 0 has no NVMe drive"):
            place_on(machines, storage=storage)
        return
    placement = place_on(machines, storage=storage)
    assert placement.ranks == 3 * len(machines[0].gpus)
    plan = plan_writers([Slice("all", range(placement.ranks), 10**11)], placement)
    check_plan(plan)
    assert plan.gap < 0.001
    for unit in (Unit.MACHINE, Unit.NVME, Unit.NIC):
        check_plan(
            plan_writers([Slice("all", range(placement.ranks), 10**11)], placement, unit=unit)
        )


def test_nearest_drives_lie_below_the_switch() -> None:
    """Two drives on one switch, one rank each: both limits count, whichever is tighter."""
    placement = place_on(cluster("dgx-a100", 2), storage="nearest")
    assert not placement.notes
    assert [kind for kind, _ in placement.kinds] == ["stream", "storage", "gpu-switch"]


def test_mixed_clusters_and_orders() -> None:
    machines = (*cluster("dgx-h100", 2), *cluster("gb200", 1))
    placement = place_on(machines)
    assert placement.ranks == 20
    assert placement.device(Unit.MACHINE, 19) == "gb200-0"
    turned = place_on(machines, ranks=[(m, i) for i in range(4) for m in range(3)])
    assert turned.ranks == 12
    assert turned.where[Unit.MACHINE].tolist() == [0, 1, 2] * 4


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ([(0, 0), (1, 8)], "Rank 1 has no device"),
        ([(0, 0), (2, 0)], "Rank 1 is on machine 2 of 2"),
        ([(0, 3), (1, 0), (0, 3)], "Ranks 0 and 2 are both on GPU 3"),
        ([], "no ranks"),
    ],
)
def test_ranks_need_devices(ranks, named) -> None:
    with pytest.raises(UnsupportedError, match=named):
        place_on(cluster("dgx-h100", 2), ranks=ranks)


def test_levels_that_cross_are_left_out_with_a_note() -> None:
    local = np.arange(4)
    rows = Level("switch", local // 2, np.array([10, 10]), ["s0", "s1"])
    columns = Level("drive", local % 2, np.array([10, 10]), ["d0", "d1"])
    streams = Level("stream", local, np.full(4, 10), ["r0", "r1", "r2", "r3"])
    forest, kinds, notes = nest([streams, rows, columns])
    assert len(notes) == 1
    assert len(kinds) == 2
    assert len(forest.capacity) == 6


def test_capacities_are_positive() -> None:
    for wrong in (0, -1, 1.5, True, 1 << 40):
        with pytest.raises(UnsupportedError, match="capacity of a storage"):
            Capacities(storage=wrong)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match=r"node1/nvme has a capacity of 0 MB/s"):
        Placement.regular(2, storage_mbps=[1, 0])
    with pytest.raises(UnsupportedError, match=r"node0/nvme has a capacity of -5 MB/s"):
        Placement.regular(2, storage_mbps=[-5, 1])


def test_forests_are_checked() -> None:
    with pytest.raises(UnsupportedError, match="a is above itself"):
        Forest(np.array([1, 1]), np.array([1, 1]), np.array([0]), ["a", "b"])
    with pytest.raises(UnsupportedError, match="parent that does not exist"):
        Forest(np.array([1, 1]), np.array([2, -1]), np.array([0]), ["a", "b"])
    with pytest.raises(UnsupportedError, match="Rank 1 has no resource"):
        Forest(np.array([1]), np.array([-1]), np.array([0, 3]), ["a"])


def test_orders_are_permutations() -> None:
    assert Placement.regular(2, [2, 1], order="cyclic").where[Unit.MACHINE].tolist() == [0, 1, 0]
    for wrong in ("random", [0, 0, 1], [0, 1]):
        with pytest.raises(UnsupportedError):
            Placement.regular(2, [2, 1], order=wrong)
