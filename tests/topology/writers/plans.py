"""Random questions to the planner, and the one helper that checks every invariant of an answer."""

import itertools
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from hypothesis import strategies as st

from tensorspill.topology.ranks.capacities import Capacities
from tensorspill.topology.ranks.placement import Placement, Unit
from tensorspill.topology.writers.plan import WriterPlan
from tensorspill.topology.writers.slices import Atom, Slice, Slices

MB = 10**6


@dataclass
class Question:
    """Slices on machines; `ranks[r]` is where rank r was before a renumbering."""

    slices: list[Slice]
    placement: Placement


@st.composite
def placements(draw, storage=None):
    """Machines of several sizes and speeds, ranks in any order, with and without a file system."""
    count = draw(st.integers(1, 6))
    each = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8]), min_size=count, max_size=count))
    kind = storage or draw(st.sampled_from(["machine", "socket", "switch", "shared"]))
    groups = count * {"machine": 1, "socket": 2, "switch": 4, "shared": 1}[kind]
    rates = draw(
        st.lists(st.sampled_from([26_000, 13_000, 6_000, 500]), min_size=groups, max_size=groups)
    )
    order = draw(st.one_of(st.sampled_from(["block", "cyclic"]), st.permutations(range(sum(each)))))
    capacities = Capacities(
        stream=draw(st.sampled_from([12_000, 3_000])),
        switch=draw(st.sampled_from([None, 50_000, 14_000])),
        filesystem=draw(st.sampled_from([None, 40_000])),
    )
    return Placement.regular(
        count, each, order=order, storage=kind, capacities=capacities, storage_mbps=rates
    )


@st.composite
def states(draw, ranks, most=6, unique=True):
    """Slices held by any sets of ranks: bytes without structure, tensors, nothing at all."""
    slices = []
    for number in range(draw(st.integers(1, most))):
        least = 1 if unique else min(2, ranks)
        replicas = draw(st.sets(st.integers(0, ranks - 1), min_size=least))
        name = f"slice{number}"
        if draw(st.booleans()):
            nbytes = draw(st.one_of(st.integers(0, 5000), st.integers(0, 50_000 * MB)))
            slices.append(Slice(name, sorted(replicas), nbytes=nbytes))
            continue
        shapes = draw(
            st.lists(
                st.tuples(st.integers(0, 5000), st.integers(1, 3 * MB)), min_size=1, max_size=4
            )
        )
        atoms = [Atom(f"{name}.{i}", *shape) for i, shape in enumerate(shapes)]
        slices.append(Slice(name, sorted(replicas), atoms=atoms))
    return slices


@st.composite
def questions(draw, most=6, unique=True):
    placement = draw(placements())
    return Question(draw(states(placement.ranks, most, unique)), placement)


def check_plan(plan: WriterPlan, copies: int = 1, apart: Unit = Unit.MACHINE) -> None:
    """Check everything that holds for every plan, whatever was asked for."""
    slices, pieces = plan.slices, plan.pieces
    assert (pieces.start < pieces.stop).all()
    assert (plan.load[plan.placement.forest.capacity == 0] == 0).all()
    for number in range(len(slices)):
        check_slice(plan, number, copies, apart)
    check_boxes(plan)
    assert plan.makespan >= plan.lower_bound
    written = [sum(p.nbytes for p in plan.pieces_of(rank)) for rank in range(plan.placement.ranks)]
    assert written == plan.written.tolist()
    assert plan.writers == tuple(rank for rank, nbytes in enumerate(written) if nbytes)


def check_boxes(plan: WriterPlan) -> None:
    """In rows of tensors as well, all is written once in each copy."""
    rows: dict[tuple[str, str, int], list[tuple[int, int]]] = {}
    for rank in range(plan.placement.ranks):
        for box in plan.boxes_of(rank):
            rows.setdefault((box.slice, box.atom, box.copy), []).append((box.first, box.last))
    found = 0
    for (_, atom, _), ranges in rows.items():
        ranges.sort()
        assert ranges[0][0] == 0
        assert all(one[1] == other[0] for one, other in itertools.pairwise(ranges))
        number = list(plan.slices.atom_names).index(atom)
        assert ranges[-1][1] == int(plan.slices.rows[number])
        found += int(plan.slices.atom_bytes[number])
    assert found == int(plan.written.sum())


def check_slice(plan: WriterPlan, number: int, copies: int, apart: Unit) -> None:
    slices, name = plan.slices, plan.slices.names[number]
    mine = plan.pieces_in(name)
    replicas = set(slices.replicas(number).tolist())
    edges = row_edges(slices, number)
    for copy in range(copies):
        at = 0
        for piece in (p for p in mine if p.copy == copy):
            assert piece.start == at, "sorted, disjoint, nothing left out"
            assert piece.rank in replicas
            assert on_edge(piece.start, edges), "cut between rows"
            at = piece.stop
        assert at == int(slices.nbytes[number])
    writers = sorted({piece.rank for piece in mine})
    if len(replicas) == 1 and mine:
        assert len(mine) == copies
    shares = [plan.share(rank, name) for rank in range(plan.placement.ranks)]
    assert [rank for rank, share in enumerate(shares) if share] == writers
    assert [share for share in shares if share] == [(len(writers), i) for i in range(len(writers))]
    if copies > 1 and apart is not Unit.REPLICA:
        check_apart(plan, mine, plan.placement.where[apart])


def check_apart(plan, pieces, domain) -> None:
    """No byte comes twice into one failure domain."""
    for i, one in enumerate(pieces):
        for other in pieces[i + 1 :]:
            if domain[one.rank] == domain[other.rank]:
                assert one.stop <= other.start or other.stop <= one.start


def row_edges(slices: Slices, number: int) -> list[tuple[int, int, int]]:
    """Return (start, stop, row bytes) of the atoms of a slice."""
    edges, at = [], 0
    for a in range(int(slices.atom_begin[number]), int(slices.atom_begin[number + 1])):
        size = int(slices.atom_bytes[a])
        edges.append((at, at + size, int(slices.row_bytes[a])))
        at += size
    return edges


def on_edge(place: int, edges: list[tuple[int, int, int]]) -> bool:
    return any(start <= place <= stop and (place - start) % row == 0 for start, stop, row in edges)


def grain(plan: WriterPlan, block: int = 1 << 12) -> int:
    """Return by how many bytes rounding may move the share of one writer in one slice."""
    rows = np.minimum(plan.slices.row_bytes, plan.slices.atom_bytes)
    return int(max(block, rows.max(initial=0)))


def pairs_through(plan: WriterPlan):
    """Return how many pairs of a slice and a writer go through each resource."""
    pairs = np.zeros(plan.placement.ranks, np.int64)
    unique = np.unique(np.stack([plan.pieces.slice, plan.pieces.rank]), axis=1)
    np.add.at(pairs, unique[1], 1)
    return plan.placement.forest.rank_load(pairs)


def rounding(plan: WriterPlan, block: int = 1 << 12) -> Fraction:
    """Return the time by which rounding to rows and blocks, and to whole ticks, may add."""
    through, forest = pairs_through(plan), plan.placement.forest
    used = np.flatnonzero(through)
    size = grain(plan, block)
    worst = [Fraction(int(through[k]) * size, int(forest.capacity[k])) for k in used]
    return max(worst, default=Fraction(0)) + 1
