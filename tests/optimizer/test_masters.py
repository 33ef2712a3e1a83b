"""Master weights: parameters of less precision are rounded copies of what is updated."""

import pytest
import torch
from torch import nn

from tests.optimizer.helpers import bits, fresh_like, settings, spilled

SHAPES = [(300, 40), (40,), (7, 3, 2), (5000,), ()]


def bfloat16(seed=0):
    torch.manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, dtype=torch.bfloat16)) for shape in SHAPES]


class Reference:
    """What everybody writes by hand: an optimizer of fp32 copies."""

    def __init__(self, cls, parameters, **options):
        self.parameters = parameters
        self.masters = [nn.Parameter(p.detach().float()) for p in parameters]
        self.optimizer = cls(self.masters, **options)

    @torch.no_grad()
    def step(self):
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            master.grad = None if parameter.grad is None else parameter.grad.float()
        self.optimizer.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.copy_(master)


def take_gradients(step, *lists):
    for parameters in lists:
        for number, parameter in enumerate(parameters):
            parameter.grad = fresh_like(parameter, 10 * step + number)


def same(optimizer, ours, reference):
    for parameter, twin, master in zip(ours, reference.parameters, reference.masters, strict=True):
        assert bits(parameter).equal(bits(twin))
        state = optimizer.state[parameter]
        assert bits(state["master"]).equal(bits(master))
        for key, value in reference.optimizer.state[master].items():
            assert bits(state[key]).equal(bits(value)), key


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad", "Adafactor"])
def test_like_an_optimizer_of_copies(name, tmp_path):
    cls, options = getattr(torch.optim, name), settings(name)
    ours, theirs = bfloat16(), bfloat16()
    reference = Reference(cls, theirs, **options)
    with spilled(
        cls, ours, tmp_path, master_dtype=torch.float32, budget="448KiB", **options
    ) as optimizer:
        for step in range(4):
            take_gradients(step, ours, theirs)
            optimizer.step()
            reference.step()
            same(optimizer, ours, reference)


@pytest.mark.parametrize("fused", [False, True])
def test_saved_and_loaded(fused, tmp_path):
    ours, theirs = bfloat16(), bfloat16()
    options = {"master_dtype": torch.float32, "budget": "448KiB", "fused": fused}
    reference = Reference(torch.optim.AdamW, theirs, fused=fused)
    with (
        spilled(torch.optim.AdamW, ours, tmp_path / "a", **options) as first,
        spilled(torch.optim.AdamW, resumed := bfloat16(1), tmp_path / "b", **options) as second,
    ):
        for step in range(2):
            take_gradients(step, ours, theirs)
            first.step()
            reference.step()
        with torch.no_grad():
            for parameter, value in zip(resumed, ours, strict=True):
                parameter.copy_(value)
        second.load_state_dict(first.state_dict())
        for step in range(2, 4):
            take_gradients(step, resumed, theirs)
            second.step()
            reference.step()
        same(second, resumed, reference)


def test_made_from_the_values_of_the_first_step(tmp_path):
    """A model may be loaded after its optimizer was made."""
    ours, theirs = bfloat16(), bfloat16(1)
    with spilled(
        torch.optim.AdamW, ours, tmp_path, master_dtype=torch.float32, budget="448KiB"
    ) as optimizer:
        with torch.no_grad():
            for parameter, value in zip(ours, theirs, strict=True):
                parameter.copy_(value)
        reference = Reference(torch.optim.AdamW, theirs)
        take_gradients(0, ours, theirs)
        optimizer.step()
        reference.step()
        same(optimizer, ours, reference)


def test_parameters_that_somebody_else_changes(tmp_path):
    """Where a parameter was changed its new value counts; elsewhere no precision is lost."""
    ours, theirs = bfloat16(), bfloat16()
    with spilled(
        torch.optim.AdamW, ours, tmp_path, master_dtype=torch.float32, budget="448KiB"
    ) as optimizer:
        reference = Reference(torch.optim.AdamW, theirs)
        for step in range(3):
            take_gradients(step, ours, theirs)
            optimizer.step()
            reference.step()
            with torch.no_grad():
                if step == 0:  # weights that are swapped out and back again, as for averaging
                    kept = ours[0].clone()
                    ours[0].zero_()
                    ours[0].copy_(kept)
                if step == 1:
                    ours[0][3:5] = 0.25
                    theirs[0][3:5] = 0.25
                    reference.masters[0][3:5] = 0.25
        same(optimizer, ours, reference)


def test_parameters_that_have_the_dtype_already(tmp_path):
    ours = [nn.Parameter(torch.ones(50)), nn.Parameter(torch.ones(50, dtype=torch.bfloat16))]
    with spilled(torch.optim.AdamW, ours, tmp_path, master_dtype=torch.float32) as optimizer:
        take_gradients(0, ours)
        optimizer.step()
        assert "master" not in optimizer.state[ours[0]]
        assert optimizer.state[ours[1]]["master"].dtype is torch.float32
