"""What must hold for every plan, over random layouts, placements and machines."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tensorspill.errors import UnsupportedError
from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.placement import Placement, Unit, level, streams
from tensorspill.topology.writers.planner import plan_writers
from tensorspill.topology.writers.selection import select_writers
from tensorspill.topology.writers.slices import Slice, Slices
from tests.topology.writers.plans import (
    MB,
    Question,
    check_plan,
    grain,
    pairs_through,
    placements,
    questions,
    rounding,
    states,
)

ALL_UNITS = st.sampled_from(list(Unit))


@given(questions())
def test_each_byte_once_by_a_replica_in_the_least_time(question: Question) -> None:
    plan = plan_writers(question.slices, question.placement)
    check_plan(plan)
    assert not plan.relaxed
    assert plan.makespan <= plan.lower_bound + rounding(plan)


@given(questions(unique=False), st.integers(2, 3), st.sampled_from([Unit.MACHINE, Unit.REPLICA]))
def test_copies_lie_in_different_domains(question: Question, copies: int, apart: Unit) -> None:
    domain = question.placement.where[Unit.MACHINE]
    for part in question.slices:
        found = {int(domain[rank]) for rank in part.replicas}
        assume(len(found if apart is Unit.MACHINE else part.replicas) >= copies)
    plan = plan_writers(question.slices, question.placement, copies=copies, apart=apart)
    check_plan(plan, copies, apart)
    assert plan.makespan <= plan.lower_bound + rounding(plan)
    once = plan_writers(question.slices, question.placement)
    assert once.lower_bound <= plan.lower_bound


@given(questions(), ALL_UNITS)
def test_at_most_one_writer_for_each_slice_and_unit(question: Question, unit: Unit) -> None:
    where = question.placement.where.get(unit)
    assume(where is None or (where >= 0).all())
    slices = Slices.of(question.slices)
    plan = plan_writers(slices, question.placement, unit=unit)
    check_plan(plan)
    for number, name in enumerate(slices.names):
        writers = {piece.rank for piece in plan.pieces_in(name)}
        if unit is Unit.NONE:
            assert len(writers) <= 1
        elif where is not None and len(slices.replicas(number)) > 1:
            assert len({int(where[rank]) for rank in writers}) == len(writers)


@given(questions(), ALL_UNITS)
def test_indices_are_places_among_the_writers(question: Question, unit: Unit) -> None:
    slices, placement = Slices.of(question.slices), question.placement
    where = placement.where.get(unit)
    assume(where is None or (where >= 0).all())
    chosen = select_writers(slices, placement, unit)
    for number, name in enumerate(slices.names):
        shares = [chosen.share(rank, name) for rank in range(placement.ranks)]
        given_out = [share for share in shares if share is not None]
        assert [share.index for share in given_out] == list(range(len(given_out)))
        assert {share.count for share in given_out} == {len(given_out)}
        replicas = slices.replicas(number).tolist()
        writers = [rank for rank, share in enumerate(shares) if share is not None]
        assert set(writers) <= set(replicas)
        if where is not None and len(replicas) > 1:
            expected = {int(where[rank]) for rank in replicas}
            assert sorted(int(where[rank]) for rank in writers) == sorted(expected)
    for rank in range(placement.ranks):
        mine = {name: chosen.share(rank, name) for name in slices.names}
        assert chosen.of(rank) == {name: share for name, share in mine.items() if share}


@given(
    questions(),
    st.sampled_from([0, 5000, MB, 300 * MB]),
    st.sampled_from([None, 1, 2, 5]),
    st.sampled_from([1, 2]),
)
def test_limits_are_kept_and_the_gap_is_told(question, min_chunk, max_writers, copies) -> None:
    domain = question.placement.where[Unit.MACHINE]
    for part in question.slices:
        assume(len({int(domain[rank]) for rank in part.replicas}) >= copies)
    assume(max_writers is None or max_writers >= copies)
    how = {"min_chunk": min_chunk, "max_writers": max_writers, "copies": copies}
    plan = plan_writers(question.slices, question.placement, **how)
    check_plan(plan, copies)
    assert plan.relaxed == (min_chunk > 0 or max_writers is not None or copies > 1)
    assert plan.gap >= -1e-12
    for number, name in enumerate(plan.slices.names):
        written: dict[int, int] = {}
        for piece in plan.pieces_in(name):
            written[piece.rank] = written.get(piece.rank, 0) + piece.nbytes
        assert max_writers is None or len(written) <= max_writers
        if len(written) > copies:
            assert min(written.values()) >= min(min_chunk, int(plan.slices.nbytes[number]))


@given(questions(), st.data())
def test_renumbering_moves_no_load(question: Question, data) -> None:
    """Ranks and machines get other numbers; loads stay with the resources, apart from rounding."""
    placement = data.draw(placements(storage="machine"))
    ranks, machines = placement.ranks, placement.machines
    slices = data.draw(states(ranks))
    new = data.draw(st.permutations(range(ranks)))
    machine_new = data.draw(st.permutations(range(machines)))
    slices = [Slice(part.name, part.replicas, size(part)) for part in slices]
    moved_slices = [
        Slice(part.name, sorted(new[rank] for rank in part.replicas), part.nbytes)
        for part in slices
    ]
    moved = renumbered(placement, new, machine_new)
    before, after = plan_writers(slices, placement), plan_writers(moved_slices, moved)
    assert before.lower_bound == after.lower_bound
    pairs_before, pairs_after = pairs_through(before), pairs_through(after)
    renamed = {name: k for k, name in enumerate(moved.forest.names)}
    for k, name in enumerate(placement.forest.names):
        other = renamed[new_name(name, new, machine_new)]
        pairs = int(pairs_before[k]) + int(pairs_after[other])
        ticks = 20 * int(placement.forest.capacity[k])  # a microsecond for each level of fairness
        allowed = pairs * grain(before) + ticks
        assert abs(int(before.load[k]) - int(after.load[other])) <= allowed


def size(part: Slice) -> int:
    return sum(atom.nbytes for atom in part.parts())


def new_name(name: str, new, machine_new) -> str:
    if name.startswith("rank"):
        return f"rank{new[int(name[4:])]}"
    if name.startswith("node"):
        machine, _, rest = name[4:].partition("/")
        return f"node{machine_new[int(machine)]}/{rest}"
    return name


def renumbered(placement: Placement, new, machine_new) -> Placement:
    """Return the same machines and ranks under other numbers."""
    order = np.argsort(new)
    where, names = {}, placement.names
    for unit, device in placement.where.items():
        each = len(names[unit]) // placement.machines or 1
        machine, local = np.divmod(device, each)
        where[unit] = (np.array(machine_new)[machine] * each + local)[order]
    forest, levels = placement.forest, [streams(placement.ranks, 1)]
    levels[0].capacity[:] = forest.capacity[: placement.ranks]
    filesystem, at = None, placement.ranks
    for kind, end in placement.kinds[1:]:
        if kind == "filesystem":
            filesystem = int(forest.capacity[at])
        else:
            unit = Unit(kind)
            each = len(names[unit]) // placement.machines
            rates = forest.capacity[at:end].reshape(placement.machines, each)
            levels.append(level(unit, where, names, rates[np.argsort(machine_new)].ravel()))
        at = end
    return Placement.of(where, names, levels, filesystem)


@given(questions(), st.data())
def test_more_replicas_or_capacity_never_take_longer(question: Question, data) -> None:
    slices, placement = question.slices, question.placement
    before = plan_writers(slices, placement).lower_bound
    j = data.draw(st.integers(0, len(slices) - 1))
    more = sorted({*slices[j].replicas, data.draw(st.integers(0, placement.ranks - 1))})
    extended = [*slices]
    extended[j] = Slice(slices[j].name, more, slices[j].nbytes, slices[j].atoms)
    assert plan_writers(extended, placement).lower_bound <= before
    k = data.draw(st.integers(0, len(placement.forest.capacity) - 1))
    slower = placement.forest.capacity.copy()
    slower[k] = max(1, slower[k] // 3)
    worse = Placement(
        placement.where,
        placement.names,
        type(placement.forest)(
            slower, placement.forest.parent, placement.forest.leaf, placement.forest.names
        ),
    )
    assert plan_writers(slices, worse).lower_bound >= before


@given(questions(), st.data())
def test_excluded_resources_get_no_bytes(question: Question, data) -> None:
    slices, placement = question.slices, question.placement
    names = placement.forest.names
    chosen = data.draw(st.sets(st.sampled_from(list(names)), min_size=1, max_size=3))
    dead = placement.without(sorted(chosen)).forest
    lost = [
        part.name
        for part in slices
        if size(part) and not dead.alive[dead.leaf[list(part.replicas)]].any()
    ]
    if lost:
        with pytest.raises(UnsupportedError) as caught:
            plan_writers(slices, placement, exclude=sorted(chosen))
        assert any(name in str(caught.value) for name in lost)
        assert any(name in str(caught.value) for name in chosen)
        return
    plan = plan_writers(slices, placement, exclude=sorted(chosen))
    check_plan(plan)
    for k, name in enumerate(names):
        assert name not in chosen or plan.load[k] == 0


@given(questions())
def test_rounding_moves_a_share_by_a_block_at_most(question: Question) -> None:
    """A plan with blocks of one byte is the real share; rows of tensors stay whole in both."""
    flat = [Slice(part.name, part.replicas, size(part)) for part in question.slices]
    fine, coarse = (plan_writers(flat, question.placement, block=block) for block in (1, 1 << 20))
    for name in fine.slices.names:
        shares: list[dict[int, int]] = [{}, {}]
        for share, plan in zip(shares, (fine, coarse), strict=True):
            for piece in plan.pieces_in(name):
                share[piece.rank] = share.get(piece.rank, 0) + piece.nbytes
        for rank in {*shares[0], *shares[1]}:
            assert abs(shares[0].get(rank, 0) - shares[1].get(rank, 0)) <= 1 << 20


@pytest.mark.parametrize("ranks", [1, 3, 10])
@pytest.mark.parametrize("machines", [1, 2, 3])
@pytest.mark.parametrize("order", ["block", "cyclic"])
@pytest.mark.parametrize("nbytes", [0, 1, 5, 4095, 4096, 4097, 10**9])
def test_degenerate(ranks: int, machines: int, order: str, nbytes: int) -> None:
    machines = min(machines, ranks)
    counts = [ranks // machines + (i < ranks % machines) for i in range(machines)]
    placement = Placement.regular(machines, counts, order=order)
    plan = plan_writers([Slice("all", range(ranks), nbytes)], placement)
    check_plan(plan)
    assert plan.makespan <= plan.lower_bound + rounding(plan)
    assert len(plan.writers) <= max(nbytes, 0)


def test_unknown_devices_only_matter_where_they_are_asked_for() -> None:
    known = Placement.regular(2, 4)
    socket = known.where[Unit.SOCKET].copy()
    socket[5] = -1
    placement = Placement({**known.where, Unit.SOCKET: socket}, known.names, known.forest)
    slices = [Slice("shared", range(8), 10**9), Slice("own", [5], 10**6)]
    check_plan(plan_writers(slices, placement))
    check_plan(plan_writers(slices, placement, unit="machine"))
    with pytest.raises(UnsupportedError, match=r"shared.*socket of rank 5"):
        plan_writers(slices, placement, unit="socket")
    # The one slice that rank 5 holds alone needs no socket.
    check_plan(plan_writers([slices[1]], placement, unit="socket"))


def test_capacities_count_exactly() -> None:
    placement = Placement.regular(
        2, 2, capacities=Capacities(stream=5, switch=None), storage_mbps=[3, 7]
    )
    plan = plan_writers([Slice("a", range(4), 1000)], placement, block=1)
    assert plan.lower_bound == Fraction(1000, 10)
    assert plan.makespan <= 101


def test_a_bound_of_nothing_is_no_proof() -> None:
    """A cut of resources that are held already, and wide enough, says nothing about the rest.

    It was taken as proof that a slice can't be written, where a preflow had not ended.
    """
    machine = np.array([0, 3, 0, 0, 3, 0, 0, 2, 1, 0, 0, 0, 3, 3, 3, 2, 3, 3, 3])
    switch = np.array([3, 12, 1, 3, 12, 2, 0, 8, 4, 1, 0, 2, 13, 13, 14, 10, 14, 15, 15])
    names = {Unit.MACHINE: ["a", "b", "c", "d"], Unit.GPU_SWITCH: [f"s{i}" for i in range(16)]}
    where = {Unit.MACHINE: machine, Unit.GPU_SWITCH: switch}
    levels = [streams(19, 12_000), level(Unit.GPU_SWITCH, where, names, 14_000)]
    levels.append(level(Unit.MACHINE, where, names, np.array([500, 500, 26_000, 26_000])))
    slices = [
        Slice("slice0", [0, 1, 3, 7, 8], 725_060_091),
        Slice("slice1", [0, 4], 24_999_999_934),
        Slice("slice2", [1], 856_873_376),
        Slice("slice3", [2], 169 * 2_028_665),
        Slice("slice4", [0, 1, 2, 3, 4, 15], 0),
        Slice("slice5", [1, 5], 48),
    ]
    plan = plan_writers(slices, Placement.of(where, names, levels, 40_000))
    check_plan(plan)
    assert plan.makespan <= plan.lower_bound + rounding(plan)
