"""A step from the drive is a step in memory, to the last bit: every optimizer of torch's.

Memory is handed out at random places of a pool that is full of NaN, so that whoever uses memory
that was let go, or was never theirs, gets other numbers.
"""

import copy
import math

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import nn

from tensorspill.optimizer.wrapped import SEPARABLE
from tests.optimizer.helpers import (
    backward,
    model,
    same_parameters,
    same_state,
    settings,
    spilled,
    train,
)
from tests.thorough import examples

FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
FOREACH = tuple(n for n in SEPARABLE if n not in ("Muon", "SparseAdam"))
CASES = [
    *((name, {}) for name in SEPARABLE if name != "SparseAdam"),
    *((name, {"foreach": True}) for name in FOREACH),
    *((name, {"foreach": False}) for name in FOREACH),
    *((name, {"fused": True}) for name in FUSED),
]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: with models this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("name", "kernel"), CASES, ids=lambda v: v if isinstance(v, str) else str(v)
)
def test_every_optimizer(name, kernel, tmp_path):
    cls, options = getattr(torch.optim, name), settings(name) | kernel
    ours, theirs = model(), model()
    of = matrices if name == "Muon" else nn.Module.parameters
    reference = cls(of(theirs), **options)
    # With 1.3 MB of state for Adam, about ten portions.
    with spilled(cls, of(ours), tmp_path, budget="448KiB", **options) as optimizer:
        assert train(ours, optimizer, range(4)) == train(theirs, reference, range(4))
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(optimizer, reference)
        if name in ("Adam", "AdamW"):
            assert optimizer.statistics().portions > 4


def matrices(module):
    return [p for p in module.parameters() if p.ndim == 2]


def test_every_class_of_torch_is_known():
    classes = {
        name
        for name, cls in vars(torch.optim).items()
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)
    }
    assert classes - {"Optimizer", "LBFGS"} == set(SEPARABLE)


@pytest.mark.parametrize("name", [n for n in SEPARABLE if n != "SparseAdam"])
def test_parameters_stepped_one_by_one(name):
    """The condition for all this: together or alone, a parameter gets the same bits."""
    cls, options = getattr(torch.optim, name), settings(name)
    together, alone = (
        [
            nn.Parameter(torch.randn(n, 7, generator=torch.Generator().manual_seed(n)))
            for n in (3, 9)
        ]
        for _ in range(2)
    )
    both, each = cls(together, **options), [cls([p], **options) for p in alone]
    for step in range(3):
        for parameter, twin in zip(together, alone, strict=True):
            generator = torch.Generator().manual_seed(step)
            parameter.grad = 100.0**step * torch.randn(parameter.shape, generator=generator)
            twin.grad = parameter.grad.clone()
        both.step()
        for optimizer in each:
            optimizer.step()
        same_parameters(together, alone)


def test_sparse_gradients(tmp_path):
    ours = nn.Embedding(50, 16, sparse=True)
    theirs = copy.deepcopy(ours)
    reference = torch.optim.SparseAdam(theirs.parameters())
    with spilled(torch.optim.SparseAdam, ours.parameters(), tmp_path) as optimizer:
        for step in range(3):
            rows = torch.randint(50, (6,), generator=torch.Generator().manual_seed(step))
            for module, one in ((ours, optimizer), (theirs, reference)):
                one.zero_grad()
                module(rows).square().sum().backward()
                one.step()
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(optimizer, reference)


def test_channels_last(tmp_path):
    """State has its parameter's layout; convolutions are where it is not the plain one."""
    ours, theirs = model(), model()
    for module in (ours, theirs):
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    reference = torch.optim.AdamW(theirs.parameters())
    with spilled(torch.optim.AdamW, ours.parameters(), tmp_path, budget="448KiB") as optimizer:
        train(ours, optimizer, range(3))
        train(theirs, reference, range(3))
        assert not next(ours.parameters()).is_contiguous()
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(optimizer, reference)


def test_accumulated_gradients_and_groups(tmp_path):
    ours, theirs = model(), model()

    def groups(module):
        matrices = [p for p in module.parameters() if p.ndim > 1]
        others = [p for p in module.parameters() if p.ndim == 1]
        return [
            {"params": matrices, "weight_decay": 0.1},
            {"params": others, "lr": 0.1, "betas": (0.5, 0.9)},
        ]

    reference = torch.optim.AdamW(groups(theirs))
    with spilled(torch.optim.AdamW, groups(ours), tmp_path, budget="448KiB") as optimizer:
        for step in range(3):
            for module, one in ((ours, optimizer), (theirs, reference)):
                for micro in range(3):
                    backward(module, 10 * step + micro)
                one.step()
                one.zero_grad(set_to_none=step % 2 == 0)
                one.param_groups[0]["lr"] = 0.01 / (step + 1)
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(optimizer, reference)


SHAPES = st.lists(
    st.lists(st.sampled_from((0, 1, 2, 3, 17, 130)), max_size=3)
    .map(tuple)
    .filter(lambda shape: math.prod(shape) < 40_000),
    min_size=1,
    max_size=7,
)


@hypothesis.settings(max_examples=examples(25))
@hypothesis.given(st.data())
def test_any_shapes_dtypes_groups_and_gaps(tmp_path_factory, data):
    """Some parameters have no gradient in some steps; state goes through a state_dict."""
    shapes = data.draw(SHAPES)
    name = data.draw(st.sampled_from(("AdamW", "SGD", "Adagrad", "NAdam", "RMSprop", "Rprop")))
    dtypes = [torch.float32, torch.float64, torch.bfloat16, torch.complex64]
    if name == "NAdam":
        dtypes.remove(torch.complex64)
    kinds = [data.draw(st.sampled_from(dtypes)) for _ in shapes]
    ours, theirs = (
        [nn.Parameter(fresh(s, d, n)) for n, (s, d) in enumerate(zip(shapes, kinds, strict=True))]
        for _ in range(2)
    )
    cut = data.draw(st.integers(0, len(shapes)))
    cls, options = getattr(torch.optim, name), settings(name)
    reference = cls(grouped(theirs, cut), **options)
    folder = tmp_path_factory.mktemp("spill")
    min_bytes = data.draw(st.sampled_from((0, 100)))
    with spilled(cls, grouped(ours, cut), folder, min_bytes=min_bytes, **options) as optimizer:
        for step in range(3):
            for number, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                present = data.draw(st.booleans())
                mine.grad = fresh(mine.shape, mine.dtype, 31 * step + number) if present else None
                other.grad = None if mine.grad is None else mine.grad.clone()
            optimizer.step()
            reference.step()
            if data.draw(st.booleans()):
                optimizer.load_state_dict(optimizer.state_dict())
                reference.load_state_dict(reference.state_dict())  # which casts, too
            same_parameters(ours, theirs)
        same_state(optimizer, reference)


def fresh(shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def grouped(parameters, cut):
    parts = [part for part in (parameters[:cut], parameters[cut:]) if part]
    return [{"params": part, "lr": 0.1 / (n + 1)} for n, part in enumerate(parts)]
