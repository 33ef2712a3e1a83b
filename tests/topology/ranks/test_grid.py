"""Which ranks are replicas of each other, under any order of the parallel dimensions."""

import itertools

import numpy as np
import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.grid import ParallelLayout, RankGrid, equal_groups, explicit_groups
from tensorspill.topology.writers.model_state import model_state


@pytest.mark.parametrize(
    "order", ["-".join(p) for p in itertools.permutations(["tp", "cp", "dp", "pp"])]
)
def test_orders_decode_ranks(order: str) -> None:
    layout = ParallelLayout(tp=2, cp=3, dp=4, pp=2, order=order)
    grid = layout.dense
    stride = 1
    for dim in order.split("-"):
        size = getattr(layout, dim)
        expected = np.arange(layout.world) // stride % size
        assert (grid.coordinate(dim) == expected).all()
        stride *= size


def test_groups_are_replicas() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=3, pp=2)
    grid = layout.dense
    sets = grid.groups(["cp", "dp"])
    labels = grid.labels(["cp", "dp"])
    assert len(sets) == len(labels) == 4
    assert (sets.sizes == 6).all()
    tp, pp = grid.coordinate("tp"), grid.coordinate("pp")
    for i, label in enumerate(labels):
        ranks = sets[i]
        assert {f"pp{p}.tp{t}" for t, p in zip(tp[ranks], pp[ranks], strict=True)} == {label}


def test_experts_take_ranks_from_data_parallelism() -> None:
    """Megatron's default order: ranks of one expert are ep x tp apart."""
    layout = ParallelLayout(tp=2, dp=8, ep=4)
    experts = layout.experts
    assert experts.coordinate("tp").tolist() == [r % 2 for r in range(16)]
    assert experts.coordinate("ep").tolist() == [r // 2 % 4 for r in range(16)]
    assert experts.coordinate("edp").tolist() == [r // 8 for r in range(16)]
    assert [group.tolist() for group in experts.groups(["edp"])][:2] == [[0, 8], [1, 9]]


def test_device_mesh() -> None:
    class Mesh:
        """As torch.distributed.device_mesh.DeviceMesh, which needs a process group."""

        mesh_dim_names = ("replicate", "shard")

        def __init__(self) -> None:
            import torch

            self.mesh = torch.arange(8).reshape(2, 4)

    grid = RankGrid.from_device_mesh(Mesh())
    assert grid.dims == ("replicate", "shard")
    assert [group.tolist() for group in grid.groups(["replicate"])] == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]


def test_explicit_groups() -> None:
    sets = explicit_groups([[3, 1], [0, 2]], 4)
    assert [group.tolist() for group in sets] == [[1, 3], [0, 2]]
    with pytest.raises(UnsupportedError, match="Rank 2 is missing"):
        explicit_groups([[0, 1], [3]], 4)
    with pytest.raises(UnsupportedError, match="Rank 1 occurs twice"):
        explicit_groups([[0, 1], [1, 2, 3]], 4)
    with pytest.raises(UnsupportedError, match="Rank 7 in the groups does not exist"):
        explicit_groups([[0, 1], [7, 2, 3]], 4)
    with pytest.raises(UnsupportedError, match="group of 3 ranks does not divide 8"):
        equal_groups(8, 3)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"tp": 0}, "tp is 0"),
        ({"dp": 6, "ep": 4}, "Expert parallelism of 4 does not divide dp 6"),
        ({"order": "tp-xp"}, "'tp-xp' is not made of"),
        ({"order": "tp-tp-dp"}, "is not made of"),
        ({"pp": 2, "order": "tp-dp"}, "does not say where pp 2 goes"),
        ({"tp": 2, "dp": 4, "pp": 2, "cp": 2, "ep": 4, "order": "tp-cp-pp-ep-dp"}, "other stages"),
    ],
)
def test_wrong_layouts_are_named(wrong, named) -> None:
    with pytest.raises(UnsupportedError, match=named):
        ParallelLayout(**wrong)


def test_grid_takes_each_rank_once() -> None:
    with pytest.raises(UnsupportedError, match="Rank 1 occurs twice in the grid"):
        RankGrid(("a", "b"), np.array([[0, 1], [1, 3]]))
    with pytest.raises(UnsupportedError, match="Dimensions"):
        RankGrid(("a",), np.array([[0, 1], [2, 3]]))


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("replicate", [1, 2])
def test_state_has_all_bytes(zero: int, replicate: int) -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=4, pp=3, ep=4)
    params, experts = 1_000_003, 4_000_037
    state = model_state(layout, params, expert_params=experts, zero=zero, replicate=replicate)
    assert int(state.nbytes.sum()) == 14 * (params + experts)
    assert len(set(state.names)) == len(state)
    for number, name in enumerate(state.names):
        copies = len(state.replicas(number))
        if "shard" in name:
            assert copies == replicate
        else:
            assert copies == (2 if name.startswith("expert") else 8)


def test_state_refuses_what_does_not_divide() -> None:
    with pytest.raises(UnsupportedError, match="ZeRO stage 4"):
        model_state(ParallelLayout(dp=4), 1, zero=4)
    with pytest.raises(UnsupportedError, match="3 replicas of shards do not divide 4"):
        model_state(ParallelLayout(dp=4), 1, zero=3, replicate=3)
