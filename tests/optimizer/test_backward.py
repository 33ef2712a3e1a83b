"""Steps in the middle of backward: the same bits as a step after it, and clear refusals."""

import copy
import gc
import logging
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tensorspill.errors import ClosedError, UnsupportedError
from tensorspill.optimizer import SpilledOptimizer, clip_grad_norm_
from tensorspill.training import offload, offloaded, smallest_budget
from tests.optimizer.helpers import (
    backward,
    bits,
    check,
    model,
    same_parameters,
    same_state,
    settings,
    spilled,
    train,
)
from tests.optimizer.test_offloaded import finish, models, offload_tightly, run
from tests.residency.models import (
    KINDS,
    SOME_KINDS,
    ReentrantlyCheckpointed,
    Reused,
    Tied,
    batches,
    loss_of,
)

AdamW = torch.optim.AdamW
BUDGET: dict[str, Any] = {"budget": "448KiB", "in_backward": True}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: with models this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pair(tmp_path):
    """An optimizer that steps in backward and its twin in memory, with equal models."""
    ours, theirs = model(), model()
    with spilled(AdamW, ours.parameters(), tmp_path, lr=0.01, **BUDGET) as optimizer:
        yield optimizer, ours, AdamW(theirs.parameters(), lr=0.01), theirs


def both(pair, steps):
    """Train both, and compare them."""
    optimizer, ours, reference, theirs = pair
    assert train(ours, optimizer, steps) == train(theirs, reference, steps)
    same_parameters(ours.parameters(), theirs.parameters())
    same_state(optimizer, reference)


def stepped(module):
    """Return how many parameters were stepped in backward."""
    return sum(type(p.grad).__name__ == "SpentGradient" for p in module.parameters())


# -- the same numbers ------------------------------------------------------------------------------

CASES = [
    ("Adam", {}),
    ("AdamW", {"fused": True}),
    ("AdamW", {"foreach": True}),
    ("AdamW", {"foreach": False}),
    ("SGD", {}),
    ("Adagrad", {}),
    ("Adafactor", {}),
]


@pytest.mark.parametrize(("name", "kernel"), CASES, ids=str)
def test_like_a_step_after_backward(name, kernel, tmp_path):
    cls, options = getattr(torch.optim, name), settings(name) | kernel
    ours, theirs = model(), model()
    reference = cls(theirs.parameters(), **options)
    with spilled(cls, ours.parameters(), tmp_path, **BUDGET, **options) as optimizer:
        both((optimizer, ours, reference, theirs), range(1))
        assert stepped(ours) == 0  # it is learnt in which order gradients come
        both((optimizer, ours, reference, theirs), range(1, 5))
        assert stepped(ours) == 9
        statistics = optimizer.statistics()
        assert statistics.steps == 5
        assert statistics.peak_bytes <= statistics.budget_bytes
        if name == "AdamW":
            assert statistics.portions > 4


def test_parameters_change_before_backward_ends(pair):
    _, ours, *_ = pair
    both(pair, range(2))
    pair[0].zero_grad()
    seen = []
    before = ours[-1].weight.detach().clone()
    ours[0].weight.register_post_accumulate_grad_hook(
        lambda _: seen.append(torch.equal(before, ours[-1].weight))
    )
    backward(ours, 2)
    assert seen == [False]


def test_groups_with_settings_of_their_own_and_a_scheduler(tmp_path):
    ours, theirs = model(), model()

    def groups(module):
        few = [p for p in module.parameters() if p.ndim < 2]
        many = [p for p in module.parameters() if p.ndim >= 2]
        return [{"params": many}, {"params": few, "lr": 0.1, "weight_decay": 0.0}]

    reference = AdamW(groups(theirs), lr=0.01)
    with spilled(AdamW, groups(ours), tmp_path, lr=0.01, **BUDGET) as optimizer:
        schedulers = [
            torch.optim.lr_scheduler.OneCycleLR(one, [0.1, 0.2], total_steps=9)
            for one in (optimizer, reference)
        ]
        for step in range(5):
            both((optimizer, ours, reference, theirs), [step])
            for scheduler in schedulers:
                scheduler.step()
        assert stepped(ours) == 9


@pytest.mark.parametrize(
    ("kind", "gradients"),
    [
        *(pytest.param(*kind.values, "spilled", marks=kind.marks) for kind in SOME_KINDS),
        (Tied, "memory"),
        (Reused, "memory"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_kind_of_model(kind, gradients, tmp_path):
    ours, theirs = models(kind)
    offload_tightly(ours, tmp_path / "model", gradients)
    reference = AdamW(theirs.parameters(), lr=0.01)
    parameters = ours.parameters()
    with spilled(
        AdamW, parameters, tmp_path / "state", budget="256KiB", lr=0.01, in_backward=True
    ) as optimizer:
        run(ours, theirs, optimizer, reference)
        before = offloaded(ours).statistics().gradients_out
        run(ours, theirs, optimizer, reference)
        same_state(optimizer, reference)
        assert offloaded(ours).statistics().gradients_out == before
        loss_of(ours, next(batches(1))).backward()
        optimizer.step()
        assert stepped(ours) == sum(p.requires_grad for p in ours.parameters())
        optimizer.zero_grad()
        loss_of(theirs, next(batches(1))).backward()
        reference.step()
    finish(ours, theirs)


@pytest.mark.parametrize("kind", [KINDS[0], Tied], ids=lambda kind: kind.__name__)
def test_the_smallest_budget(kind, tmp_path):
    """Where backward leaves no room for what is ready, the step makes it."""
    ours, theirs = models(kind)
    options: dict[str, Any] = {"min_bytes": 500, "gradients": "spilled"}
    options["blocks"] = list(ours.blocks)
    offload(ours, tmp_path / "model", smallest_budget(ours, **options), **options)
    reference = AdamW(theirs.parameters(), lr=0.01)
    parameters = ours.parameters()
    with spilled(
        AdamW, parameters, tmp_path / "state", budget="1MiB", lr=0.01, in_backward=True
    ) as optimizer:
        run(ours, theirs, optimizer, reference)
        same_state(optimizer, reference)
    finish(ours, theirs)


class Repeating(ReentrantlyCheckpointed):
    """A block called twice, each time in a backward of its own inside of backward."""

    def through(self, x):
        for number in (0, 1, 2, 1, 3, 4):
            x = checkpoint(self.blocks[number], x, use_reentrant=True)
        return x


class RepeatingTied(Tied, ReentrantlyCheckpointed):
    """Shared weights, whose gradients come from several backwards inside of backward."""

    through = ReentrantlyCheckpointed.through


@pytest.mark.parametrize("gradients", ["memory", "spilled"])
@pytest.mark.parametrize("kind", [Repeating, RepeatingTied], ids=lambda kind: kind.__name__)
def test_gradients_that_come_in_pieces_wait_for_the_step(kind, gradients, tmp_path, caplog):
    ours, theirs = models(kind)
    offload_tightly(ours, tmp_path / "model", gradients)
    reference = AdamW(theirs.parameters(), lr=0.01)
    parameters = ours.parameters()
    with spilled(
        AdamW, parameters, tmp_path / "state", budget="64KiB", lr=0.01, in_backward=True
    ) as optimizer:
        with caplog.at_level(logging.WARNING):
            run(ours, theirs, optimizer, reference)
        assert "stepped after backward" in caplog.text
        assert len(caplog.records) == 1
        loss_of(ours, next(batches(1))).backward()
        assert 0 < stepped(ours) < len(list(ours.parameters()))
        optimizer.step()
        loss_of(theirs, next(batches(1))).backward()
        reference.step()
        same_state(optimizer, reference)
    finish(ours, theirs)


@pytest.mark.parametrize("gradients", ["memory", "spilled"])
def test_accumulated_gradients(gradients, tmp_path):
    ours, theirs = models(KINDS[0])
    offload_tightly(ours, tmp_path / "model", gradients)
    reference = AdamW(theirs.parameters(), lr=0.01)
    parameters = ours.parameters()
    with spilled(
        AdamW, parameters, tmp_path / "state", budget="64KiB", lr=0.01, in_backward=True
    ) as optimizer:
        for number, text in enumerate(batches(15)):
            last = number % 3 == 2
            if last:
                loss_of(ours, text).backward()
            else:
                with optimizer.accumulating():
                    loss_of(ours, text).backward()
            loss_of(theirs, text).backward()
            if last:
                assert (stepped(ours) > 0) == (number > 2)
                for one in (optimizer, reference):
                    one.step()
                    one.zero_grad()
        same_state(optimizer, reference)
    finish(ours, theirs)


def test_accumulating_without_steps_in_backward(tmp_path):
    ours = model()
    with spilled(AdamW, ours.parameters(), tmp_path) as optimizer, optimizer.accumulating():
        backward(ours, 0)
        assert stepped(ours) == 0


def test_frozen_and_unused_parameters(pair):
    optimizer, ours, reference, theirs = pair
    for step in range(6):
        for one, net in ((optimizer, ours), (reference, theirs)):
            for number, parameter in enumerate(net.parameters()):
                parameter.requires_grad_((number + step) % 3 > 0)
            one.zero_grad()
            part = net if step % 2 else nn.Sequential(*net[:-1])
            backward(part, step)
            one.step()
    same_parameters(ours.parameters(), theirs.parameters())
    same_state(optimizer, reference)


def test_frozen_when_it_was_made(tmp_path):
    ours, theirs = model(), model()
    for net in (ours, theirs):
        net[3].weight.requires_grad_(False)
    reference = AdamW(theirs.parameters())
    with spilled(AdamW, ours.parameters(), tmp_path, **BUDGET) as optimizer:
        both((optimizer, ours, reference, theirs), range(3))
        for net in (ours, theirs):
            net[3].weight.requires_grad_(True)
        both((optimizer, ours, reference, theirs), range(3, 6))
        assert stepped(ours) == 9


def test_added_groups(pair):
    optimizer, ours, reference, theirs = pair
    both(pair, range(2))
    torch.manual_seed(1)
    more, its_twin = nn.Linear(20, 20), nn.Linear(20, 20)
    its_twin.load_state_dict(more.state_dict())
    for one, layer in ((optimizer, more), (reference, its_twin)):
        one.add_param_group({"params": list(layer.parameters()), "lr": 0.5})
    ours, theirs = nn.Sequential(ours, more), nn.Sequential(theirs, its_twin)
    both((optimizer, ours, reference, theirs), range(2, 5))
    assert stepped(ours) == 11


def test_masters(tmp_path):
    ours, theirs = model().bfloat16(), model().bfloat16()
    options = {"master_dtype": torch.float32, "lr": 0.01}
    with (
        spilled(AdamW, ours.parameters(), tmp_path / "a", **options, **BUDGET) as first,
        spilled(AdamW, theirs.parameters(), tmp_path / "b", **options) as second,
    ):
        for step in range(4):
            for net, one in ((ours, first), (theirs, second)):
                one.zero_grad()
                data = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
                net(data.bfloat16()).square().mean().backward()
                one.step()
        assert stepped(ours) == 9
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(first, second)


def test_state_between_steps(pair, tmp_path):
    optimizer, ours, *_ = pair
    both(pair, range(3))
    twin = copy.deepcopy(model())
    twin.load_state_dict(ours.state_dict())
    with spilled(AdamW, twin.parameters(), tmp_path / "2", **BUDGET) as second:
        second.load_state_dict(optimizer.state_dict())
        same_state(second, optimizer)
        optimizer.load_state_dict(second.state_dict())
        both(pair, range(3, 6))
        train(twin, second, range(3, 6))
        same_state(second, optimizer)
    same_parameters(twin.parameters(), ours.parameters())


def test_gradients_that_are_dropped_before_a_step(pair):
    _, ours, *_ = pair
    both(pair, range(2))
    ours.zero_grad()
    with pair[0].accumulating():
        backward(ours, 7)
    ours.zero_grad()
    both(pair, range(2, 4))
    assert stepped(ours) == 9


def test_gradients_of_create_graph_wait_for_the_step(pair):
    optimizer, ours, reference, theirs = pair
    both(pair, range(2))
    for net, one in ((ours, optimizer), (theirs, reference)):
        one.zero_grad()
        loss = net(torch.ones(2, 3, 6, 6)).square().mean()
        with warnings.catch_warnings(action="ignore"):  # torch says that this makes a cycle
            loss.backward(create_graph=True)
        assert stepped(net) == 0
        one.step()
        for parameter in net.parameters():
            parameter.grad = None
    same_parameters(ours.parameters(), theirs.parameters())
    both(pair, range(2, 4))


def test_gradients_that_are_asked_for_are_no_backward(pair):
    _, ours, *_ = pair
    both(pair, range(2))
    loss = ours(torch.ones(2, 3, 6, 6)).square().mean()
    assert stepped(ours) == 9
    found = torch.autograd.grad(loss, list(ours.parameters()))
    assert all(gradient.isfinite().all() for gradient in found)
    both(pair, range(2, 4))


# -- what is refused -------------------------------------------------------------------------------


def test_gradients_are_gone_after_backward(pair):
    _, ours, *_ = pair
    both(pair, range(2))
    gradient = ours[3].weight.grad
    assert gradient.shape == ours[3].weight.shape
    assert "SpentGradient" in repr(gradient)
    for use in (torch.Tensor.norm, torch.Tensor.clone, torch.Tensor.zero_, copy.deepcopy):
        with pytest.raises(UnsupportedError, match="given up"):
            use(gradient)
    for clip in (torch.nn.utils.clip_grad_norm_, clip_grad_norm_):
        with pytest.raises(UnsupportedError, match="in_backward"):
            clip(ours.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="given up"):
        torch.nn.utils.clip_grad_value_(ours.parameters(), 1.0)
    with pytest.raises(UnsupportedError, match="given up"):
        AdamW(ours.parameters()).step()


def test_a_second_backward_is_refused(pair):
    optimizer, ours, *_ = pair
    both(pair, range(2))
    before = [bits(p).clone() for p in ours.parameters()]
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="accumulating"):
            backward(ours, 2)  # zero_grad was forgotten
    assert all(torch.equal(a, bits(b)) for a, b in zip(before, ours.parameters(), strict=True))
    optimizer.zero_grad()
    backward(ours, 2)
    with pytest.raises(UnsupportedError, match="accumulating"), optimizer.accumulating():
        backward(ours, 3)


def test_accumulation_that_is_not_announced_waits_for_the_step(pair):
    """From the first step on; it costs what steps in backward gain."""
    optimizer, ours, reference, theirs = pair
    for step in range(6):
        for net, one in ((ours, optimizer), (theirs, reference)):
            backward(net, step)
            if step % 2:
                one.step()
                one.zero_grad()
    same_parameters(ours.parameters(), theirs.parameters())
    same_state(optimizer, reference)


def test_scalers_and_closures_are_refused(tmp_path):
    for number, fused in enumerate((False, True)):
        ours = model()
        with spilled(
            AdamW, ours.parameters(), tmp_path / str(number), fused=fused, **BUDGET
        ) as optimizer:
            before = [bits(p).clone() for p in ours.parameters()]
            scaler = torch.amp.GradScaler("cpu")
            scaler.scale(ours(torch.ones(2, 3, 6, 6)).mean()).backward()
            with pytest.raises(UnsupportedError, match="unscale"):
                scaler.step(optimizer)
            with pytest.raises(UnsupportedError, match="closure"):
                optimizer.step(lambda: 0)
            assert all(
                torch.equal(a, bits(b)) for a, b in zip(before, ours.parameters(), strict=True)
            )


def test_settings_that_change_between_backward_and_step(pair):
    optimizer, ours, *_ = pair
    both(pair, range(2))
    optimizer.zero_grad()
    backward(ours, 2)
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(UnsupportedError, match="lr of group 0"):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.01
    optimizer.step()
    assert optimizer.statistics().steps == 3


# -- the end ---------------------------------------------------------------------------------------


def test_closing(tmp_path):
    ours = model()
    optimizer = SpilledOptimizer(AdamW, ours.parameters(), folder=tmp_path, min_bytes=0, **BUDGET)
    train(ours, optimizer, range(3))
    optimizer.close()
    assert all(p.grad is None for p in ours.parameters())
    backward(ours, 3)
    assert stepped(ours) == 0
    with pytest.raises(ClosedError):
        optimizer.step()


def test_dropped_without_closing(tmp_path):
    ours = model()
    optimizer = SpilledOptimizer(AdamW, ours.parameters(), folder=tmp_path, min_bytes=0, **BUDGET)
    train(ours, optimizer, range(3))
    optimizer.zero_grad()
    del optimizer
    gc.collect()
    assert not any(tmp_path.rglob("*.spill"))
    backward(ours, 3)
    assert stepped(ours) == 0


def test_nothing_stays_pinned(pair):
    both(pair, range(3))
    check(pair[0])
