import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.checkpoint.distributed.description import Part, decode_parts, encode_parts
from tensorspill.checkpoint.distributed.limits import Limits
from tensorspill.checkpoint.files.chunks import Box
from tensorspill.errors import UnsupportedError
from tests.checkpoint.plans import check_plan, part, plan_of, replicated, table

pytestmark = pytest.mark.usefixtures("preloaded")

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


@st.composite
def states(draw):
    """What each of some ranks holds: replicas, shards, replicas of shards, and the unknown."""
    size = draw(st.integers(1, 4))
    parts: list[list[Part]] = [[] for _ in range(size)]
    for number in range(draw(st.integers(1, 6))):
        name, kind = (
            f"t{number}",
            draw(st.sampled_from(("replicas", "shards", "unknown", "objects"))),
        )
        shape = draw(SHAPES)
        ranks = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
        if kind == "shards" and shape:
            edges = sorted(draw(st.sets(st.integers(1, 8)))) if shape[0] else []
            edges = [0, *(e for e in edges if e < shape[0]), shape[0]]
            for low, high in itertools.pairwise(edges):
                box = Box((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))
                holders = tuple(sorted(draw(st.sets(st.integers(0, size - 1), min_size=1))))
                for rank in holders:
                    parts[rank].append(part(name, shape, box, holders))
        elif kind == "objects":
            for rank in ranks:
                parts[rank].append(Part(name, ""))
        else:
            for rank in ranks:
                parts[rank].append(part(name, shape, None, ranks if kind == "replicas" else ()))
    return parts


@given(states(), st.sampled_from([1, 16, 64, 1 << 20]), st.sampled_from(["replica", "machine"]))
def test_every_element_is_written_once_by_a_rank_that_holds_it(parts, min_chunk, unit):
    plan = plan_of(parts, hosts=2, min_chunk=min_chunk, unit=unit)
    check_plan(plan, parts)
    assert plan.digest == plan_of(parts, hosts=2, min_chunk=min_chunk, unit=unit).digest


@given(states())
def test_descriptions_travel_and_stay_equal(parts):
    for held in parts:
        assert decode_parts(encode_parts(held)) == held


@pytest.mark.parametrize("size", [2, 4])
def test_writers_are_balanced_within_a_chunk(size):
    ranks = tuple(range(size))
    shapes = [(48, 96), (96,), (1000, 7), (3, 5, 11), (2048, 12)]
    held = [replicated(f"t{i}", shape, ranks) for i, shape in enumerate(shapes)]
    plan = plan_of([held] * size, min_chunk=1024)
    check_plan(plan, [held] * size)
    # A row of the widest tensor is smaller than a chunk.
    assert max(plan.written) - min(plan.written) <= 1024


def test_what_only_one_rank_holds_counts_for_it():
    shared = replicated("shared", (1000, 16), (0, 1))
    parts = [[shared, part("own", (500, 16))], [shared]]
    plan = plan_of(parts, min_chunk=64)
    check_plan(plan, parts)
    assert abs(plan.written[0] - plan.written[1]) <= 64


def test_stacked_experts_are_cut_along_their_second_dimension():
    held = [replicated("experts", (2, 96, 64), (0, 1, 2, 3))]
    plan = plan_of([held] * 4, min_chunk=1024)
    check_plan(plan, [held] * 4)
    assert len(set(plan.written)) == 1
    assert all(box.lengths[0] == 1 for rank in range(4) for _, _, box in plan.writes_of(rank))


def test_small_tensors_are_written_whole():
    held = [replicated(f"t{i}", (10, 10), (0, 1, 2)) for i in range(30)]
    plan = plan_of([held] * 3, min_chunk=401)
    assert sorted(len(plan.writes_of(rank)) for rank in range(3)) == [10, 10, 10]
    assert all(box == source for rank in range(3) for _, source, box in plan.writes_of(rank))


def test_what_is_not_known_to_be_equal_is_never_cut_and_comes_from_the_lowest_rank():
    parts = [[part("buffer", (1000, 10))] for _ in range(4)]
    plan = plan_of(parts, min_chunk=1)
    assert plan.written == (40_000, 0, 0, 0)


def test_replicas_of_different_things_are_not_mixed():
    parts = [
        [part("state", (1000,), ranks=(0, 1, 2), why="of parameter a")],
        [part("state", (1000,), ranks=(0, 1, 2), why="of parameter b")],
        [part("state", (1000,), ranks=(0, 1, 2), why="of parameter a")],
    ]
    plan = plan_of(parts, min_chunk=16)
    assert plan.written == (2000, 0, 2000)


def test_excluded_ranks_write_nothing():
    held = [replicated("w", (100, 10), (0, 1, 2)), part("buffer", (10,)), Part("object", "")]
    plan = plan_of([held] * 3, min_chunk=40, exclude=("rank0",))
    assert plan.written[0] == 0
    assert plan.objects == {"object": 1}
    assert plan.written[1] == pytest.approx(plan.written[2], abs=40)


def test_a_shard_whose_only_holder_is_excluded_is_named():
    parts = [[part("a", (4,))], [part("b", (4,))]]
    with pytest.raises(UnsupportedError, match="'b' is held only by ranks 1"):
        plan_of(parts, exclude=("rank1",))
    with pytest.raises(UnsupportedError, match="no resource 'rank7'"):
        plan_of(parts, exclude=("rank7",))


def test_a_unit_has_one_writer():
    held = [replicated("w", (1000, 16), (0, 1, 2, 3))]
    plan = plan_of([held] * 4, hosts=2, unit="machine", min_chunk=64)
    assert sorted(map(bool, plan.written)) == [False, False, True, True]
    assert len({rank // 2 for rank, n in enumerate(plan.written) if n}) == 2
    assert sum(map(bool, plan_of([held] * 4, unit="none", min_chunk=64).written)) == 1
    assert sum(map(bool, plan_of([held] * 4, max_writers=3, min_chunk=64).written)) == 3


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[part("w", (4,))], [part("w", (5,))]], "of shape"),
        ([[part("w", (4,))], [part("w", (4,), dtype="int8")]], "int8"),
        ([[part("w", (4,))], [Part("w", "")]], "a Python object"),
        ([[part("w", (4,), Box((0,), (3,)))]], "not all of it"),
        ([[part("w", (4,))], [part("w", (4,), Box((0,), (2,)))]], "overlap"),
    ],
)
def test_ranks_that_disagree_are_told_what_about(parts, said):
    with pytest.raises(UnsupportedError, match=said):
        plan_of(parts)


def test_a_plan_follows_capacities():
    from tensorspill.topology.ranks.rank_table import RankRecord, RankTable

    held = [replicated("w", (3000, 16), (0, 1))]
    rates = (3000, 6000)
    slow = RankTable(
        tuple(
            RankRecord(rank=r, host=f"h{r}", local_rank=0, storage_mbps=rate)
            for r, rate in enumerate(rates)
        )
    )
    from tensorspill.checkpoint.distributed.planning import make_plan

    limits = Limits(table=slow, min_chunk=64)
    plan = make_plan([held] * 2, (0, 1), limits.placement(table(2)), limits, "q")
    assert plan.written[1] == pytest.approx(2 * plan.written[0], abs=200)


@pytest.mark.parametrize("options", [{"min_chunk": 0}, {"exclude": "rank0"}])
def test_limits_are_checked(options):
    with pytest.raises(UnsupportedError):
        Limits(**options)


def test_volumes_of_long_shapes_are_exact():
    shape = (1 << 20, 1 << 20, 3)
    held = [part("w", shape, Box((0, 0, 0), shape), (0, 1))]
    plan = plan_of([held] * 2)
    assert sum(plan.written) == math.prod(shape) * 4
