"""Backward through spilled tensors gives the same gradients, to the last bit."""

import copy

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tensorspill.activations import activation_spill
from tensorspill.demo.model import GPT, Shape
from tensorspill.residency import Residency
from tensorspill.swap import ParameterSwapper
from tests.activations.helpers import check_free, gradients, same, spilling
from tests.residency.models import SOME_KINDS, batches, loss_of
from tests.thorough import examples


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: with models this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair(kind, seed=0):
    torch.manual_seed(seed)
    model = kind()
    return model, copy.deepcopy(model)


@pytest.mark.parametrize("kind", SOME_KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_model(kind, tmp_path):
    """Activation checkpointing around blocks and inside of them, and all else, among them.

    Backward inside of the context, and after it.
    """
    ours, theirs = pair(kind)
    with spilling(tmp_path) as spill:
        for inside, text in zip((True, False, False), batches(3), strict=True):
            ours.zero_grad()
            theirs.zero_grad()
            with spill:
                loss = loss_of(ours, text)
                if inside:
                    loss.backward()
            if not inside:
                loss.backward()
            loss_of(theirs, text).backward()
            assert same(*([p.grad for p in m.parameters()] for m in (ours, theirs)))
            del loss
        assert spill.statistics().tensors > 0


@pytest.mark.parametrize("kind", SOME_KINDS, ids=lambda kind: kind.__name__)
def test_together_with_residency(kind, tmp_path):
    """Parameters on the drive as well; whoever is entered last, each keeps what is its own.

    First with the context around the model, then with one in each block.
    """
    ours, theirs = pair(kind)
    with (
        ParameterSwapper(tmp_path / "p", torch.float32, "256KiB", min_bytes=0) as swapper,
        spilling(tmp_path / "a") as spill,
    ):
        units = ours.units() if hasattr(ours, "units") else list(ours.blocks)
        residency = Residency(ours, units, swapper)
        for outside, text in zip((True, False), batches(2), strict=True):
            if not outside:
                for block in ours.blocks:
                    _enter_inside(block, spill)
            if outside:
                with spill:
                    loss = loss_of(ours, text)
            else:
                loss = loss_of(ours, text)
            loss.backward()
            loss_of(theirs, text).backward()
            del loss
        assert same(*([p.grad for p in m.parameters()] for m in (ours, theirs)))
        assert spill.statistics().tensors > 0 or "Checkpointed" in kind.__name__
        residency.close(restore=True)


def _enter_inside(block, spill):
    """Let a block's own forward enter the spill, inside of all hooks on the block."""
    plain = block.forward

    def forward(*args, **kwargs):
        with spill:
            return plain(*args, **kwargs)

    block.forward = forward


@pytest.mark.parametrize("reentrant", [True, False])
def test_inside_of_a_checkpoint(reentrant, tmp_path):
    """There nothing is saved, so nothing is spilled; the second time it is needed at once."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(30, 30), nn.Tanh()), torch.randn(50, 30, requires_grad=True)

    def run(context):
        def function(value):
            with context:
                return model(value).exp()

        return checkpoint(function, x, use_reentrant=reentrant).sum()

    with spilling(tmp_path) as spill:
        expected = gradients(model(x).exp().sum(), [x])
        loss = run(spill)
        found = gradients(loss, [x]) if not reentrant else _through_backward(loss, x)
        assert same(found, expected)
        assert spill.statistics().tensors == 0
        del loss


def _through_backward(loss, x):
    loss.backward()
    return [x.grad]


def test_inputs_of_checkpoints_are_spilled(tmp_path):
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(30, 30) for _ in range(4))
    x = torch.randn(50, 30, requires_grad=True)

    def run():
        value = x * 2
        for layer in layers:
            value = checkpoint(lambda v, layer=layer: layer(v).sin(), value, use_reentrant=False)
        return value.sum()

    with spilling(tmp_path) as spill:
        with spill:
            loss = run()
        assert spill.statistics().ranges >= 4
        assert same(gradients(loss, [x]), gradients(run(), [x]))
        del loss


def test_autocast(tmp_path):
    ours, theirs = pair(lambda: GPT(Shape(layers=2, width=32, heads=2, context=16)))
    text = torch.randint(256, (3, 16))
    with spilling(tmp_path) as spill:
        for model, context in ((ours, spill), (theirs, torch.enable_grad())):
            with context, torch.autocast("cpu", dtype=torch.bfloat16):
                loss = functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
            loss.backward()
            del loss
        assert same(*([p.grad for p in m.parameters()] for m in (ours, theirs)))


OPERATIONS = {
    "exp": lambda a, b: a.exp() * 0.1,
    "mul": lambda a, b: a * b,
    "matmul": lambda a, b: a @ b.t() / 10,
    "slice": lambda a, b: torch.cat((a[:, :4] * b[:, 4:8], a[:, 4:]), 1),
    "chunk": lambda a, b: sum(part.sigmoid() for part in a.chunk(4)).repeat(4, 1),
    "transposed": lambda a, b: (a.t().softmax(0) * b.t()).t(),
    "norm": lambda a, b: functional.layer_norm(a, (12,)),
    "expanded": lambda a, b: a * b[:1].expand(12, 12),
    "double": lambda a, b: (a.double() * b.double()).float(),
    "complex": lambda a, b: torch.fft.ifft(torch.fft.fft(a) * torch.fft.fft(b).conj()).real,
    "negative": lambda a, b: torch.complex(a, b).conj().imag.tanh() + a,
    "in place": lambda a, b: (a * b).relu_(),
    "dropout": lambda a, b: a * (b > 0),
}


@hypothesis.settings(max_examples=examples(20))
@hypothesis.given(
    st.lists(
        st.tuples(st.sampled_from(sorted(OPERATIONS)), st.integers(0, 99), st.integers(0, 99)),
        min_size=1,
        max_size=12,
    ),
    st.sampled_from((1, 200, 600)),
    st.booleans(),
)
def test_random_graphs(tmp_path_factory, steps, min_bytes, twice):
    """Views, shared memory, many dtypes; forward with 16 KiB of memory for two directions."""
    torch.manual_seed(0)
    leaves = [torch.randn(12, 12, requires_grad=True) for _ in range(2)]

    def run():
        values = list(leaves)
        for name, left, right in steps:
            a, b = values[left % len(values)], values[right % len(values)]
            values.append(OPERATIONS[name](a, b).clamp(-10, 10))
        return torch.stack(values[2:]).square().mean()

    folder = tmp_path_factory.mktemp("spill")
    with spilling(folder, min_bytes=min_bytes, budget="16KiB") as spill:
        with spill:
            loss = run()
        expected = run()
        for keep in (True, False) if twice else (False,):
            found = gradients(loss, leaves, retain_graph=keep)
            assert same(found, gradients(expected, leaves, retain_graph=keep))
        del loss


def test_double_backward(tmp_path):
    torch.manual_seed(0)
    x = torch.randn(40, 40, requires_grad=True)

    def run():
        loss = (x.exp() @ x.sin()).square().mean()
        (first,) = torch.autograd.grad(loss, [x], create_graph=True)
        return gradients((first * loss).sum(), [x])

    with spilling(tmp_path) as spill:
        with spill:
            found = run()
        assert same(found, run())


def test_bytes_larger_than_the_budget(tmp_path):
    x = torch.randn(300, 300, requires_grad=True)
    with spilling(tmp_path, budget="64KiB") as spill:
        with spill:
            loss = (x.exp() * x.sin()).sum()
        assert same(gradients(loss, [x]), gradients((x.exp() * x.sin()).sum(), [x]))
        del loss
        statistics = spill.statistics()
        assert statistics.most_held_bytes <= 360_000
        check_free(spill)


def test_on_other_devices_nothing_is_taken(tmp_path):
    with activation_spill(tmp_path, min_bytes=1, budget="64KiB") as spill:
        x = torch.randn(20, device="meta", requires_grad=True)
        x.exp().sum().backward()
        assert spill.statistics().tensors == 0
    spill.close()
