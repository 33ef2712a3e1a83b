"""Each crash and each loss that was seen in the system this replaces, as a test by its name.

There, a writer's index came from ``rank // ranks_per_resource``: half of the bytes were lost on one
layout, a ZeroDivisionError raised on another. Here an index is a place among the sorted writers.
"""

from typing import Any

import numpy as np
import pytest

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.grid import ParallelLayout
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.writers.model_state import model_state
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.selection import WriterShare, select_writers
from tensorspill.topology.writers.slices import Slice, Slices
from tests.topology.writers.plans import check_plan

#: Bytes of the model's state, in all tests below.
PARAMS = 10**9
EVERY_UNIT = [
    Unit.NONE,
    Unit.REPLICA,
    Unit.SOCKET,
    Unit.MACHINE,
    Unit.NIC,
    Unit.NVME,
    Unit.GPU_SWITCH,
]


def check(slices: Slices, placement: Placement, unit: Unit) -> None:
    """Nothing is lost, nothing is written twice, and indices are 0 to n - 1 for each slice."""
    plan = plan_writers(slices, placement, unit=unit)
    check_plan(plan)
    assert int(plan.written.sum()) == int(slices.nbytes.sum())
    chosen = select_writers(slices, placement, unit)
    shares: dict[str, list[WriterShare]] = {name: [] for name in slices.names}
    for rank in range(placement.ranks):
        for name, share in chosen.of(rank).items():
            shares[name].append(share)
    for given_out in shares.values():
        assert [share.index for share in given_out] == list(range(len(given_out)))
        assert all(share.count == len(given_out) for share in given_out)


def test_tp8_by_socket() -> None:
    """Seen: writers 0, 2, 4 … of n: half of the bytes unassigned, then an assertion."""
    check(model_state(ParallelLayout(tp=8, dp=4), PARAMS), Placement.regular(4), Unit.SOCKET)


@pytest.mark.parametrize("unit", [Unit.SOCKET, Unit.MACHINE])
def test_tp_pp_dp_order(unit: Unit) -> None:
    """Seen: SOCKET covers 6 % of the bytes, MACHINE 12 %."""
    layout = ParallelLayout(tp=8, pp=8, dp=8, order="tp-pp-dp")
    check(model_state(layout, PARAMS), Placement.regular(64), unit)


@pytest.mark.parametrize("unit", EVERY_UNIT)
def test_experts_by_unit(unit: Unit) -> None:
    """Seen: NameError for MoE with EP > 1 and SOCKET or MACHINE."""
    slices = model_state(ParallelLayout(dp=32, ep=8), PARAMS, expert_params=8 * PARAMS)
    check(slices, Placement.regular(4), unit)


def test_cyclic_placement_by_machine() -> None:
    """Seen: all 8 writers claim index 0."""
    check(
        model_state(ParallelLayout(dp=64), PARAMS),
        Placement.regular(8, order="cyclic"),
        Unit.MACHINE,
    )


@pytest.mark.parametrize("unit", [Unit.SOCKET, Unit.MACHINE])
def test_uneven_nodes(unit: Unit) -> None:
    """Seen: an index twice."""
    placement = Placement.regular(8, [8] * 4 + [4] * 4)
    check(model_state(ParallelLayout(dp=48), PARAMS), placement, unit)


@pytest.mark.parametrize("unit", [Unit.SOCKET, Unit.MACHINE])
def test_dp10_on_two_nodes(unit: Unit) -> None:
    """Seen: index 4 of 4."""
    check(model_state(ParallelLayout(dp=10), PARAMS), Placement.regular(2, 5), unit)


@pytest.mark.parametrize("unit", [Unit.SOCKET, Unit.MACHINE])
def test_dp3_on_two_nodes(unit: Unit) -> None:
    """Seen: ZeroDivisionError."""
    check(model_state(ParallelLayout(dp=3), PARAMS), Placement.regular(2, [2, 1]), unit)


@pytest.mark.parametrize("unit", [Unit.SOCKET, Unit.MACHINE])
def test_tp8_pp2_dp3(unit: Unit) -> None:
    """Seen: an assertion."""
    check(model_state(ParallelLayout(tp=8, pp=2, dp=3), PARAMS), Placement.regular(6), unit)


@pytest.mark.parametrize("unit", EVERY_UNIT)
def test_no_model_parallelism_at_all(unit: Unit) -> None:
    """Seen: AttributeError where `data_parallel` is unset and there is no mpu."""
    check(model_state(ParallelLayout(dp=8), PARAMS), Placement.regular(1), unit)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("unit", EVERY_UNIT)
def test_non_writers_are_none_at_every_zero_stage(zero: int, unit: Unit) -> None:
    """Seen at stages 1 and 2: 24 of 32 non-writers become writer 0 of 1."""
    placement = Placement.regular(4)
    slices = model_state(ParallelLayout(dp=32), PARAMS, zero=zero)
    check(slices, placement, unit)
    chosen = select_writers(slices, placement, unit)
    expected = {
        Unit.NONE: 1,
        Unit.REPLICA: 32,
        Unit.SOCKET: 8,
        Unit.MACHINE: 4,
        Unit.NIC: 4,
        Unit.NVME: 4,
        Unit.GPU_SWITCH: 16,
    }[unit]
    replicated = [name for name in slices.names if "shard" not in name]
    assert bool(replicated) == (zero < 3)
    for name in replicated:
        shares = [chosen.share(rank, name) for rank in range(32)]
        assert sum(share is not None for share in shares) == expected
        assert shares.count(None) == 32 - expected


@pytest.mark.parametrize("unit", EVERY_UNIT)
def test_unique_optimizer_shards_are_whole(unit: Unit) -> None:
    """Seen: a unique shard is cut 1/n all the same: 33 of 133 bytes written."""
    slices = model_state(ParallelLayout(dp=8), 133, zero=1, optimizer_bytes=1)
    plan = plan_writers(slices, Placement.regular(2, 4), unit=unit)
    check_plan(plan)
    for name in slices.names:
        if "shard" in name:
            (piece,) = plan.pieces_in(name)
            assert plan.share(piece.rank, name) == (1, 0)
            assert piece.nbytes == int(slices.nbytes[slices.number(name)])


def test_experts_and_dense_state_are_shared_apart() -> None:
    """Seen with MoE and REPLICA: only DP rank 0 saves dense state, cut to 1/EDP."""
    layout = ParallelLayout(dp=16, ep=4)
    slices = model_state(layout, PARAMS, expert_params=4 * PARAMS)
    chosen = select_writers(slices, Placement.regular(2), Unit.REPLICA)
    for rank in range(16):
        shares = chosen.of(rank)
        assert shares["weights.pp0.tp0"].count == 16
        assert shares["weights.pp0.tp0"].index == rank
        (expert,) = (name for name in shares if name.startswith("expert.weights"))
        assert (shares[expert].count, shares[expert].index) == (4, rank // 4)


@pytest.mark.parametrize("sockets", [1, 2, 4, 8])
def test_number_of_sockets_is_real(sockets: int) -> None:
    """Seen: two sockets a machine, hard-coded."""
    placement = Placement.regular(2, sockets=sockets)
    slices = model_state(ParallelLayout(dp=16), PARAMS)
    check(slices, placement, Unit.SOCKET)
    chosen = select_writers(slices, placement, Unit.SOCKET)
    assert sum(bool(chosen.of(rank)) for rank in range(16)) == 2 * sockets


def test_one_writer_mode_spreads_slices_over_the_ranks_of_a_machine() -> None:
    slices = Slices.of([Slice(f"s{i}", range(8), 10**9) for i in range(4)])
    # Equal sets of ranks are one set; different ones go to different ranks.
    sets = [sorted({*range(8)} - {i}) for i in range(4, 8)]
    apart = Slices.of([Slice(f"s{i}", ranks, 10**9) for i, ranks in enumerate(sets)])
    placement = Placement.regular(1)
    check(slices, placement, Unit.MACHINE)
    chosen = select_writers(apart, placement, Unit.MACHINE)
    assert [sorted(chosen.of(rank)) for rank in range(4)] == [["s0"], ["s1"], ["s2"], ["s3"]]


def test_infeasible_asks_name_slice_and_resource() -> None:
    placement = Placement.regular(2, 2)
    with pytest.raises(
        UnsupportedError, match=r"own.*rank 3 writes through node1/nvme, .*excluded"
    ):
        plan_writers([Slice("own", [3], 10)], placement, exclude=["node1/nvme"])
    with pytest.raises(UnsupportedError, match=r"pair.*only 1 domains"):
        plan_writers([Slice("pair", [0, 1], 10)], placement, copies=2)
    with pytest.raises(UnsupportedError, match="2 copies need more than 1 writers"):
        plan_writers([Slice("pair", [0, 3], 10)], placement, copies=2, max_writers=1)
    with pytest.raises(UnsupportedError, match=r"wide.*rank 4.*4 ranks"):
        plan_writers([Slice("wide", [0, 4], 10)], placement)
    with pytest.raises(UnsupportedError, match="empty has no replica"):
        plan_writers([Slice("empty", [], 10)], placement)
    with pytest.raises(UnsupportedError, match="no resource 'node9'"):
        plan_writers([Slice("a", [0], 10)], placement, exclude=["node9"])
    limits: list[dict[str, Any]]
    limits = [{"copies": 0}, {"block": 0}, {"min_chunk": -1}, {"max_writers": 0}]
    for wrong in limits:
        with pytest.raises(UnsupportedError):
            plan_writers([Slice("a", [0], 10)], placement, **wrong)


def test_dead_writers_are_replaced_in_the_same_way_everywhere() -> None:
    """After a failed attempt, ranks that exclude the same resources make the same new plan."""
    placement = Placement.regular(4)
    slices = [Slice("all", range(32), 10**10)]
    plans = [plan_writers(slices, placement, exclude=["node1", "rank9"]) for _ in range(2)]
    assert plans[0].digest == plans[1].digest
    assert not np.isin(plans[0].writers, range(8, 16)).any()
    check_plan(plans[0])
