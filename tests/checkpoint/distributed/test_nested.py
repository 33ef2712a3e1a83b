import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from tensorspill.checkpoint.distributed.nested import flatten, put, rebuild
from tensorspill.errors import UnsupportedError

TENSOR = torch.zeros(1)
LEAVES = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(TENSOR), st.just((1, TENSOR))
)


def states(letters, least=0):
    """Nested states, with keys of these letters and numbers, and so many items in each part."""
    keys = st.one_of(st.text(letters, min_size=1, max_size=2), st.integers(0, 12))
    inner = st.recursive(
        LEAVES,
        lambda inner: (
            st.lists(inner, min_size=least, max_size=3)
            | st.dictionaries(keys, inner, min_size=least, max_size=3)
        ),
        max_leaves=12,
    )
    return st.dictionaries(keys, inner, max_size=4)


@given(states("ab.01"))
def test_names_and_paths_are_those_of_dcp(state):
    try:
        expected, paths = flatten_state_dict(state)
    except ValueError:
        with pytest.raises(UnsupportedError, match="have the name"):
            flatten(state)
        return
    found, own = flatten(state)
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in found)
    assert own == paths


# Not with a number and its text as keys of one dictionary, which have the same path.
@given(states("ab", 1))
def test_what_was_flattened_can_be_put_together_again(state):
    flat, paths = flatten(state)
    again: dict[str, object] = {}
    for name, value in flat.items():
        put(again, paths[name], value)
    assert flatten(again)[0] == flat


@given(states("ab.01"))
def test_a_state_can_be_made_again_with_other_values(state):
    try:
        flat, paths = flatten(state)
    except UnsupportedError:
        return
    others = {n: torch.ones(1) if v is TENSOR else object() for n, v in flat.items()}
    found, own = flatten(rebuild(state, others))
    assert own == paths
    assert all(found[name] is others[name] for name in others)


def test_keys_that_are_numbers_are_found_by_their_text():
    state = {"state": {0: {"step": 1}}, "groups": [{"lr": 1}]}
    put(state, ("state", "0", "step"), 2)
    put(state, ("state", "1", "step"), 3)
    put(state, ("groups", 0, "lr"), 4)
    put(state, ("groups", 1, "lr"), 5)
    assert state == {"state": {0: {"step": 2}, 1: {"step": 3}}, "groups": [{"lr": 4}, {"lr": 5}]}


def test_two_values_with_one_name_are_refused():
    with pytest.raises(UnsupportedError, match=r"'a\.b'"):
        flatten({"a.b": 1, "a": {"b": 2}})
