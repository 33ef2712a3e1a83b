"""Reading: only what is needed, from any layout into any layout."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.reading import Reader, Want
from tensorspill.errors import ClosedError, MissingNameError, UnsupportedError
from tensorspill.pool import BufferPool
from tests.checkpoint.files.helpers import (
    fresh,
    holds,
    mixed_state,
    poisoned,
    same,
    save,
    split,
)
from tests.thorough import examples


@pytest.fixture(scope="module")
def state():
    # A row of more than a MiB, a short first dimension, and columns that are wanted alone.
    return mixed_state() | {"long rows": fresh((3, 500, 700)), "experts": fresh((4, 64, 96))}


@pytest.fixture(scope="module", params=[1, 3])
def reader(request, state, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    objects = {"o": b"x" * 10_000, "empty": b""}
    path = save(root, "a", state, objects, writers=request.param)
    with Reader(path, staging=BufferPool("12MiB", poison=True)) as reader:
        yield reader


@st.composite
def wants(draw, state):
    name = draw(st.sampled_from(sorted(state)))
    offsets, lengths = [], []
    for size in state[name].shape:
        low = draw(st.integers(0, size))
        high = draw(st.integers(low, size))
        if draw(st.booleans()):
            low, high = 0, size
        offsets.append(low)
        lengths.append(high - low)
    box = Box(tuple(offsets), tuple(lengths))
    order = draw(st.permutations(range(len(lengths))))
    memory = poisoned([lengths[dim] for dim in order], state[name].dtype)
    back = [order.index(dim) for dim in range(len(order))]
    return Want(name, box, memory.permute(back))


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(100))
def test_any_part_into_any_strides(data, reader, state):
    chosen = data.draw(st.lists(wants(state), max_size=5))
    done = reader.read(chosen)
    for want in chosen:
        assert same(want.destination, want.box.of(state[want.name]).detach())
    assert done.bytes_needed == sum(want.destination.nbytes for want in chosen)


def test_everything(reader, state):
    assert holds(reader.folder, state)


def test_objects(reader):
    assert reader.read_object("o") == b"x" * 10_000
    assert reader.read_object("empty") == b""
    with pytest.raises(MissingNameError):
        reader.read_object("large")


@pytest.mark.parametrize("writers", [1, 2, 3, 4])
@pytest.mark.parametrize("readers", [1, 2, 3, 4])
def test_resharding_rows_reads_little_more_than_is_needed(tmp_path, writers, readers):
    state = {"a": fresh((4800, 500)), "b": fresh((1200, 2000)), "c": fresh((960, 1024))}
    path = save(tmp_path, "a", state, writers=writers)
    parts = {name: split(tensor.shape, readers) for name, tensor in state.items()}
    for rank in range(readers):
        with Reader(path) as reader:
            chosen = [
                Want(name, parts[name][rank], poisoned(parts[name][rank].lengths, torch.float32))
                for name in state
            ]
            done = reader.read(chosen)
        assert done.bytes_read / done.bytes_needed <= 1.1
        assert all(same(w.destination, w.box.of(state[w.name])) for w in chosen)


def test_neighbouring_wants_are_joined(tmp_path):
    state = {"a": fresh((4096, 256))}
    path = save(tmp_path, "a", state)
    with Reader(path) as reader:
        chosen = [
            Want("a", Box((row, 0), (1, 256)), poisoned((1, 256), torch.float32))
            for row in range(100, 1100)
        ]
        done = reader.read(chosen)
    assert all(same(w.destination, w.box.of(state["a"])) for w in chosen)
    assert done.bytes_read <= done.bytes_needed + (256 << 10)


def test_small_tensors_are_read_together(tmp_path):
    state = {f"t{i}": fresh((25, 10)) for i in range(2000)}
    path = save(tmp_path, "a", state)
    out = {name: poisoned((25, 10), torch.float32) for name in state}
    with Reader(path) as reader:
        done = reader.read(Want(name, Box.whole((25, 10)), t) for name, t in out.items())
        statistics = reader._engine.host.statistics()
    assert all(same(out[name], state[name]) for name in state)
    assert done.bytes_read <= 1.1 * done.bytes_needed
    assert sum(path.operations for path in statistics.by_path.values()) < 40


def test_columns_of_stacked_experts_are_read_by_expert(tmp_path):
    state = {"experts": fresh((3, 1200, 400))}
    path = save(tmp_path, "a", state)
    box = Box((0, 600, 0), (3, 600, 400))
    out = poisoned(box.lengths, torch.float32)
    with Reader(path) as reader:
        done = reader.read([Want("experts", box, out)])
    assert same(out, box.of(state["experts"]))
    assert done.bytes_read <= 1.2 * done.bytes_needed


def test_only_what_is_asked_for_changes(reader, state):
    whole = poisoned((1500, 1000), torch.float32)
    before = whole.clone()
    box = Box((100, 0), (200, 1000))
    reader.read([Want("large", box, whole[100:300])])
    assert same(whole[100:300], state["large"][100:300])
    assert same(whole[:100], before[:100])
    assert same(whole[300:], before[300:])


@pytest.mark.parametrize(
    ("want", "error"),
    [
        (Want("none", Box((), ()), torch.zeros(())), MissingNameError),
        (Want("one", Box((0,), (1,)), torch.zeros(1)), UnsupportedError),
        (Want("one", Box((0,), (2,)), torch.zeros(2, dtype=torch.uint8)), UnsupportedError),
        (Want("one", Box((0,), (1,)), torch.zeros(2, dtype=torch.uint8)), UnsupportedError),
        (Want("one", Box((1,), (1,)), torch.zeros(1, dtype=torch.uint8)), UnsupportedError),
    ],
)
def test_wants_that_cant_be_met_change_nothing(reader, want, error):
    other = poisoned((1500, 1000), torch.float32)
    before = other.clone()
    with pytest.raises(error):
        reader.read([Want("large", Box.whole((1500, 1000)), other), want])
    assert same(other, before)


def test_a_closed_reader(tmp_path):
    path = save(tmp_path, "a", {"a": fresh((3,))}, {"o": b"x"})
    reader = Reader(path)
    reader.close()
    reader.close()
    with pytest.raises(ClosedError):
        reader.read([Want("a", Box((0,), (3,)), torch.zeros(3))])
    with pytest.raises(ClosedError):
        reader.read_object("o")
