"""`offload`: plain models, trained from the drive to the same bits, and what it refuses."""

import copy
import errno
import pickle

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tensorspill.errors import (
    BrokenError,
    CapacityError,
    ClosedError,
    MissingNameError,
    NoSpaceError,
    UnsupportedError,
)
from tensorspill.residency import residency_of
from tensorspill.training import find_blocks, offload, offloaded
from tests.faults import Rule, faulty_file_system, in_child, small_file_system
from tests.residency.models import SOME_KINDS, VALUES, WIDTH, Model, Perceptron, batches, loss_of
from tests.residency.test_residency import one_thread
from tests.thorough import examples
from tests.training.scattering import scattering
from tests.training.trainer import Trainer, check_equal, make, train

__all__ = ["one_thread"]


# -- equality ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gradients", ["memory", "spilled"])
@pytest.mark.parametrize("kind", SOME_KINDS)
def test_training_gives_the_same_bits(tmp_path, kind, gradients):
    model, reference = make(kind)
    total = sum(p.nbytes for p in model.parameters())
    with scattering():
        offload(model, tmp_path, total, gradients=gradients, min_bytes=0)
        with offloaded(model) as handle:
            assert train(model, 3) == train(reference, 3)
            assert handle.statistics().parameters > 0
            assert handle.statistics().pinned_bytes == kept_bytes(handle)
            handle.close(restore=True)
    check_equal(model, reference)


def kept_bytes(handle):
    return sum(entry.nbytes for entry in handle.residency._kept)


@st.composite
def graphs(draw, depth=2):
    """Return a tree of modules: leaves, sequences, lists called in any order, and ties."""
    leaf = st.tuples(st.just("leaf"), st.integers(1, 40), st.booleans())
    if depth == 0:
        return draw(leaf)
    inner = st.lists(graphs(depth=depth - 1), min_size=1, max_size=3)
    order = st.lists(st.integers(0, 2), min_size=1, max_size=4)
    return draw(
        st.one_of(
            leaf,
            st.tuples(st.just("list"), inner, order, st.booleans()),
            st.tuples(st.just("own"), inner, st.booleans()),
        )
    )


class Leaf(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.expand = nn.Linear(WIDTH, hidden)
        self.contract = nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x):
        return x + self.contract(self.expand(x).tanh())


class Listed(nn.Module):
    def __init__(self, children, order, recomputed):
        super().__init__()
        self.parts = nn.ModuleList(map(build, children))
        self.order, self.recomputed = order, recomputed

    def forward(self, x):
        for index in self.order:
            part = self.parts[index % len(self.parts)]
            x = checkpoint(part, x, use_reentrant=False) if self.recomputed else part(x)
        return x


class Owning(nn.Module):
    """Has a parameter itself, and uses that of a child without calling it."""

    def __init__(self, children, reaching):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(8, WIDTH))
        self.parts = nn.Sequential(*map(build, children))
        self.reaching = reaching

    def forward(self, x):
        if self.reaching:
            weight = next(self.parts.parameters())
            x = x + weight.square().mean()
        return self.parts(x * self.scale.mean(0))


def build(tree):
    if tree[0] == "leaf":
        leaf = Leaf(tree[1])
        if tree[2]:
            leaf.expand.weight.requires_grad_(False)
        return leaf
    if tree[0] == "list":
        return Listed(*tree[1:])
    return Owning(*tree[1:])


class Graph(nn.Module):
    def __init__(self, tree, ties):
        super().__init__()
        self.bytes = nn.Embedding(VALUES, WIDTH)
        self.body = build(tree)
        self.head = nn.Linear(WIDTH, VALUES, bias=False)
        if ties[0]:
            self.head.weight = self.bytes.weight
        linear = [m for m in self.body.modules() if isinstance(m, nn.Linear)]
        for first, second in ties[1]:
            one, two = linear[first % len(linear)], linear[second % len(linear)]
            if one.weight.shape == two.weight.shape:
                two.weight = one.weight

    def forward(self, text):
        return self.head(self.body(self.bytes(text)))


@hypothesis.settings(
    max_examples=examples(40),
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    tree=graphs(),
    ties=st.tuples(
        st.booleans(), st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=2)
    ),
    part=st.sampled_from([0.0, 0.5, 1.5]),
    gradients=st.sampled_from(["memory", "spilled"]),
    autocast=st.booleans(),
    seed=st.integers(0, 1 << 16),
)
def test_random_graphs_give_the_same_bits(tmp_path, tree, ties, part, gradients, autocast, seed):
    model, reference = make(lambda: Graph(tree, ties), seed)
    expected = train(reference, 2, autocast=autocast)
    with scattering(seed):
        smallest = smallest_budget(model, tmp_path, gradients)
        total = 8192 + sum(4096 + p.nbytes for p in model.parameters())
        resident = int(smallest + part * total) + (total if gradients == "spilled" else 0)
        offload(model, tmp_path, resident, gradients=gradients, min_bytes=0)
        with offloaded(model) as handle:
            try:
                assert train(model, 2, autocast=autocast) == expected
            except CapacityError:  # a weight that is used elsewhere has to stay as well
                hypothesis.assume(part > 0)
                raise
            handle.close(restore=True)
    check_equal(model, reference)


def smallest_budget(model, folder, gradients):
    """Return what the error says."""
    with pytest.raises(CapacityError) as caught:
        offload(model, folder, 0, gradients=gradients, min_bytes=0)
    assert caught.value.asked is not None
    assert str(caught.value.asked) in str(caught.value)
    return caught.value.asked


@pytest.mark.parametrize("kind", SOME_KINDS)
def test_the_smallest_budget_that_is_named_works(tmp_path, kind):
    model, reference = make(kind)
    smallest = smallest_budget(model, tmp_path, "memory")
    with pytest.raises(CapacityError):
        offload(model, tmp_path, smallest - 1, min_bytes=0)
    check_equal(model, reference)
    offload(model, tmp_path, smallest, min_bytes=0)
    offloaded(model).close(restore=True)
    check_equal(model, reference)


def test_evaluation_between_steps(tmp_path):
    model, reference = make(Model)
    offload(model, tmp_path, 120_000, min_bytes=0)
    ours, theirs = Trainer(model), Trainer(reference)
    for text in batches(3):
        assert ours.step(text) == theirs.step(text)
        model.eval()
        with torch.no_grad():
            assert torch.equal(model(text), reference(text))
        model.train()
    offloaded(model).close(restore=True)
    check_equal(model, reference)


@pytest.mark.thorough
def test_random_layers_of_torch(tmp_path):
    """Attention reaches into its output layer, which is found out and kept."""

    def build():
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 64, dropout=0.0, batch_first=True)
        return nn.Sequential(nn.Embedding(VALUES, WIDTH), nn.TransformerEncoder(layer, 3))

    model, reference = make(build)
    offload(model, tmp_path, 110_000, min_bytes=0)
    for each in (model, reference):
        for text in batches(2):
            each(text).square().mean().backward()
    offloaded(model).close(restore=True)
    check_equal(model, reference)


# -- autocast ------------------------------------------------------------------------------------


class Wide(Model):
    def make_block(self, number):
        return Perceptron(1024)


class Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, 2048).requires_grad_(False)
        self.back = nn.Linear(2048, WIDTH).requires_grad_(False)
        self.beside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.back(self.base(x).tanh()) + self.beside(x)


class Adapting(Model):
    def make_block(self, number):
        return Adapted()


class Casts(TorchDispatchMode):
    """Follows the memory of large tensors that are cast, whoever holds them."""

    def __init__(self):
        super().__init__()
        self.made: list[tuple[StorageWeakRef, int]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.numel() >= WIDTH * 1024:
            storage = made.untyped_storage()
            self.made.append((StorageWeakRef(storage), storage.nbytes()))
        return made

    def bytes_alive(self):
        return sum(nbytes for reference, nbytes in self.made if not reference.expired())


@pytest.mark.parametrize("kind", [Wide, Adapting])
@pytest.mark.parametrize("calls", [1, 2])
def test_copies_that_autocast_keeps_take_no_memory(tmp_path, kind, calls):
    model, reference = make(lambda: kind(6))
    block = sum(p.nbytes for p in model.blocks[0].parameters())
    offload(model, tmp_path, 4 * block, blocks=model.blocks, min_bytes=4096)
    halves = []
    for each in (model, reference):
        x = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
        with Casts() as casts, torch.autocast("cpu", torch.bfloat16):
            for _ in range(calls):  # the second time, the same copies are used again
                x = each.through(x)
            halves.append(casts.bytes_alive())
        x.float().square().sum().backward()
    assert halves[1] >= 6 * block * 0.4
    assert halves[0] <= block // 2
    offloaded(model).close(restore=True)
    check_equal(model, reference)


def test_a_copy_of_a_parameter_that_changed_is_refused(tmp_path):
    model, _ = make(Wide)
    offload(model, tmp_path, "1MiB", min_bytes=4096)
    with offloaded(model) as handle:
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model, next(batches(1)))
        with handle.residency.updating(model.blocks[2]), torch.no_grad():
            model.blocks[2].contract.weight.mul_(2)
        with pytest.raises(UnsupportedError, match="between forward and backward"):
            loss.backward()


# -- finding blocks ------------------------------------------------------------------------------


def names(model, blocks):
    known = {module: name for name, module in model.named_modules()}
    return [known[block] for block in blocks]


def found(model, limit=1 << 30):
    return names(model, find_blocks(model, limit, lambda p: p.nbytes > 0))


def test_which_blocks_are_found():
    model = Model(3)
    assert found(model) == ["bytes", "blocks.0", "blocks.1", "blocks.2", "head"]
    assert found(model, 0)[1:4] == ["blocks.0.norm", "blocks.0.expand", "blocks.0.contract"]
    assert found(nn.Linear(3, 3)) == [""]
    plain = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3)))
    assert found(plain) == ["0", "2.0"]
    layer = nn.TransformerEncoderLayer(8, 2, 16)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert found(encoder) == ["layers.0", "layers.1"]
    assert "layers.1.self_attn" in found(encoder, 4 << 12)
    nested = nn.ModuleList([nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]) for _ in range(2)])
    assert found(nested) == ["0.0", "0.1", "1.0", "1.1"]
    assert found(nn.ParameterList([nn.Parameter(torch.ones(3))])) == []
    shared = nn.Linear(2, 2)
    assert found(nn.Sequential(shared, nn.ReLU(), shared)) == ["0"]


def test_blocks_that_are_given(tmp_path):
    model, reference = make(Model)
    offload(model, tmp_path, "1MiB", blocks=model.blocks[1:3], min_bytes=0)
    with offloaded(model) as handle:
        assert handle.statistics().blocks == 2
        assert residency_of(model.blocks[1].expand.weight) is handle.residency
        assert residency_of(model.blocks[0].expand.weight) is None
        assert train(model, 2) == train(reference, 2)


# -- state ---------------------------------------------------------------------------------------


def test_state_is_read_one_by_one_or_as_a_whole(tmp_path):
    model, reference = make(Model)
    model.register_buffer("steps", torch.tensor(3))
    reference.register_buffer("steps", torch.tensor(3))
    offload(model, tmp_path, 60_000, min_bytes=0)
    with offloaded(model) as handle:
        state, expected = handle.state(), reference.state_dict()
        assert set(state) == set(expected)
        assert len(state) == len(expected)
        assert all(torch.equal(state[name], value) for name, value in expected.items())
        assert all(torch.equal(v, expected[name]) for name, v in model.state_dict().items())
        with pytest.raises(MissingNameError):
            state["nothing"]
        peak = handle.statistics().peak_bytes
        assert peak <= 60_000
        model.load_state_dict({name: value * 2 for name, value in expected.items()})
        assert torch.equal(state["blocks.2.expand.weight"], 2 * expected["blocks.2.expand.weight"])


def test_copies_are_refused(tmp_path):
    model, _ = make(Model)
    offload(model, tmp_path, "1MiB", min_bytes=0)
    with offloaded(model):
        with pytest.raises(UnsupportedError, match="copied"):
            copy.deepcopy(model)
        with pytest.raises(UnsupportedError, match="copied"):
            pickle.dumps(model)


# -- bad input -----------------------------------------------------------------------------------


def test_what_cannot_be_offloaded(tmp_path):
    model, reference = make(Model)
    with pytest.raises(UnsupportedError, match="was not offloaded"):
        offloaded(model)
    with pytest.raises(UnsupportedError, match="none of"):
        offload(model, tmp_path, gradients="elsewhere")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="negative"):
        offload(model, tmp_path, prefetch=-1)
    with pytest.raises(UnsupportedError, match="no module with parameters"):
        offload(model, tmp_path, min_bytes="1GiB")
    with pytest.raises(UnsupportedError):
        offload(model, tmp_path, no_such_option=1, min_bytes=0)
    with torch.device("meta"):
        nowhere = Model()
    with pytest.raises(UnsupportedError, match="values"):
        offload(nowhere, tmp_path)
    offload(model, tmp_path, "1MiB", min_bytes=0)
    with pytest.raises(UnsupportedError, match="before"):
        offload(model, tmp_path)
    offloaded(model).close(restore=True)
    check_equal(model, reference)
    assert train(model, 1) == train(reference, 1)
    assert "forward" not in model.__dict__


class Elsewhere(nn.Parameter):
    """Says that it is on another device, where there is none."""

    device = torch.device("cuda:1")


def test_a_model_on_several_devices(tmp_path):
    model, _ = make(Model)
    model.head.weight = Elsewhere(model.head.weight.data)
    with pytest.raises(UnsupportedError, match="several devices: cpu, cuda:1"):
        offload(model, tmp_path)


def test_two_models_in_one_folder(tmp_path):
    pairs = [make(Model, seed) for seed in range(2)]
    for model, _ in pairs:
        offload(model, tmp_path, 60_000, min_bytes=0)
    trainers = [(Trainer(model), Trainer(reference)) for model, reference in pairs]
    for text in batches(3):
        for ours, theirs in trainers:
            assert ours.step(text) == theirs.step(text)
    for model, reference in pairs:
        offloaded(model).close(restore=True)
        check_equal(model, reference)
    assert not list(tmp_path.rglob("*.spill"))


class Text(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return list(batches(4))[index][0]


def test_workers_that_load_data_fork(tmp_path):
    model, reference = make(Model)
    offload(model, tmp_path, 60_000, min_bytes=0)
    ours, theirs = Trainer(model), Trainer(reference)
    loader = torch.utils.data.DataLoader(Text(), batch_size=2, num_workers=2)
    for text in loader:
        assert ours.step(text) == theirs.step(text)
    offloaded(model).close(restore=True)
    check_equal(model, reference)


def test_a_forked_child_cannot_use_the_model_and_does_no_harm(tmp_path):
    model, reference = make(Model)
    offload(model, tmp_path, 60_000, min_bytes=0)

    def child():
        with pytest.raises(ClosedError):
            loss_of(model, next(batches(1)))
        del model.__dict__["_tensorspill"]
        return True

    assert in_child(child)
    assert train(model, 2) == train(reference, 2)
    offloaded(model).close(restore=True)
    check_equal(model, reference)


class Raising(nn.Module):
    """A hook of the user's that raises when it is told to."""

    raises = False

    def __call__(self, *_):
        if Raising.raises:
            raise ZeroDivisionError


@pytest.mark.parametrize("where", ["pre", "post", "backward", "gradient"])
@pytest.mark.parametrize("gradients", ["memory", "spilled"])
def test_a_hook_that_raises(tmp_path, where, gradients):
    model, reference = make(Model)
    offload(model, tmp_path, 100_000, gradients=gradients, min_bytes=0)
    block, hook = model.blocks[2], Raising()
    if where == "pre":
        block.register_forward_pre_hook(hook)
    elif where == "post":
        block.register_forward_hook(hook)
    elif where == "backward":
        block.register_full_backward_hook(hook)
    else:
        block.expand.weight.register_hook(hook)
    ours, theirs = Trainer(model), Trainer(reference)
    for text in batches(3):
        Raising.raises = True
        with pytest.raises(ZeroDivisionError):
            loss_of(model, text).backward()
        Raising.raises = False
        model.zero_grad()
        assert ours.step(text) == theirs.step(text)
        assert offloaded(model).statistics().pinned_bytes == 0
    offloaded(model).close(restore=True)
    check_equal(model, reference)


@pytest.mark.parametrize("gradients", ["memory", "spilled"])
def test_a_drive_that_fails_in_the_middle_of_a_step(tmp_path, gradients):
    model, reference = make(Model)
    with faulty_file_system(tmp_path) as files:
        offload(model, files.folder, 60_000, gradients=gradients, min_bytes=0)
        ours, theirs = Trainer(model), Trainer(reference)
        text, other = batches(2)
        assert ours.step(text) == theirs.step(text)
        offloaded(model).flush()
        files.rules(Rule(op="read", error=errno.EIO))
        with pytest.raises(BrokenError):
            ours.step(other)
        files.rules()
        model.zero_grad()
        # What was good before is still there, and the next step goes on from it.
        assert torch.equal(
            offloaded(model).state()["blocks.1.expand.bias"], reference.blocks[1].expand.bias
        )
        assert ours.step(other) == theirs.step(other)
        offloaded(model).close(restore=True)
        check_equal(model, reference)


def test_writes_that_fail_keep_the_new_values_in_memory(tmp_path):
    model, reference = make(Model)
    with faulty_file_system(tmp_path) as files:
        offload(model, files.folder, 60_000, min_bytes=0)
        ours, theirs = Trainer(model), Trainer(reference)
        text, other = batches(2)
        assert ours.step(text) == theirs.step(text)
        offloaded(model).flush()
        weight, same = model.blocks[3].expand.weight, reference.blocks[3].expand.weight
        files.rules(Rule(op="write", error=errno.EIO))
        with offloaded(model).residency.updating_parameters([weight]), torch.no_grad():
            weight.add_(1)
        with pytest.raises(BrokenError):
            offloaded(model).flush()
        files.rules()
        with torch.no_grad():
            same.add_(1)
        offloaded(model).flush()
        assert ours.step(other) == theirs.step(other)
        offloaded(model).close(restore=True)
        check_equal(model, reference)


class Wider(Model):
    def make_block(self, number):
        return Perceptron(8192)


def test_a_full_drive(tmp_path):
    model, reference = make(lambda: Wider(8))
    with small_file_system(tmp_path, 1 << 20) as folder:
        with pytest.raises(NoSpaceError):
            offload(model, folder, "6MiB", min_bytes=4096)
        check_equal(model, reference)
        assert train(model, 1) == train(reference, 1)
