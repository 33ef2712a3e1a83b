"""Labels beside an axis: apart, in order, within, and no further off than they must be."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from tensorspill.profiling.pictures.placing import apart

PLACES = st.lists(st.floats(0, 1), max_size=12)


@given(PLACES, st.floats(0.001, 0.3))
def test_places_are_apart_in_order_and_within(wanted, gap):
    found = apart(wanted, gap, 0.0, 1.0)
    assert len(found) == len(wanted)
    room = gap if gap * (len(wanted) - 1) < 1 else 1 / max(1, len(wanted) - 1)
    order = sorted(range(len(wanted)), key=lambda number: wanted[number])
    for one, other in itertools.pairwise(order):
        assert found[other] - found[one] >= room - 1e-9
    assert all(-1e-9 <= place <= 1 + 1e-9 for place in found)


@given(PLACES, st.floats(0.001, 0.05))
def test_places_that_are_apart_stay(wanted, gap):
    spaced = [place for number, place in enumerate(sorted(wanted)) if number % 3 == 0]
    if all(b - a >= gap for a, b in itertools.pairwise(spaced)):
        found = apart(spaced, gap, 0.0, 1.0)
        assert all(abs(a - b) < 1e-9 for a, b in zip(found, spaced, strict=True))


def test_two_at_one_place_move_away_from_each_other_alike():
    assert apart([0.5, 0.5], 0.25, 0.0, 1.0) == [0.375, 0.625]
    assert apart([1.0, 1.0], 0.25, 0.0, 1.0) == [0.75, 1.0]
    assert apart([], 0.2, 0.0, 1.0) == []
