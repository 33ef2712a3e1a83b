"""A spilled optimizer is an optimizer of torch's: schedulers, scalers, hooks, state dicts."""

import copy
import gc
import io
import os
import pickle
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.errors import CapacityError, ClosedError, UnsupportedError
from tensorspill.optimizer import SpilledOptimizer
from tests.optimizer.helpers import (
    backward,
    check,
    model,
    same_parameters,
    same_state,
    spilled,
    train,
)

AdamW = torch.optim.AdamW


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Compute in one thread: with models this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def pair(tmp_path):
    """A spilled optimizer and its twin in memory, with equal models."""
    ours, theirs = model(), model()
    with spilled(AdamW, ours.parameters(), tmp_path, budget="448KiB", lr=0.01) as optimizer:
        yield optimizer, ours, AdamW(theirs.parameters(), lr=0.01), theirs


# -- beside other parts of torch ---------------------------------------------------------------

SCHEDULERS = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=9),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=2),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers(name, pair):
    ours, theirs = pair[:2], pair[2:]
    schedulers = [SCHEDULERS[name](ours[0]), SCHEDULERS[name](theirs[0])]
    for step in range(5):
        for (optimizer, module), scheduler in zip((ours, theirs), schedulers, strict=True):
            train(module, optimizer, [step])
            scheduler.step()
    same_parameters(ours[1].parameters(), theirs[1].parameters())
    same_state(ours[0], theirs[0])


@pytest.mark.parametrize("fused", [False, True])
def test_gradient_scaler(fused, tmp_path):
    """Fused kernels unscale themselves; a step whose gradients overflow is left out."""
    ours, theirs = model(), model()
    reference = AdamW(theirs.parameters(), fused=fused)
    with spilled(AdamW, ours.parameters(), tmp_path, budget="448KiB", fused=fused) as optimizer:
        for module, one in ((ours, optimizer), (theirs, reference)):
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
            for step in range(5):
                one.zero_grad()
                data = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(step))
                loss = module(data).square().mean() * (float("inf") if step == 2 else 1)
                scaler.scale(loss).backward()
                if step == 3:
                    scaler.unscale_(one)
                    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
                scaler.step(one)
                scaler.update()
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(optimizer, reference)


def test_hooks_run_once_a_step(pair):
    optimizer, module, *_ = pair
    seen: list[str | bool] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    everywhere = register_optimizer_step_pre_hook(
        lambda one, *_: seen.append(isinstance(one, SpilledOptimizer))
    )
    optimizer.register_state_dict_pre_hook(lambda *_: seen.append("saving"))
    optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("loaded"))
    try:
        train(module, optimizer, [0])
    finally:
        everywhere.remove()
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.statistics().portions > 1
    assert seen == [True, "before", "after", "saving", "loaded"]


def test_closures(pair):
    optimizer, module, reference, twin = pair

    def closure_for(net, one):
        def closure():
            one.zero_grad()
            return backward(net, 3)

        return closure

    found = optimizer.step(closure_for(module, optimizer))
    assert found == reference.step(closure_for(twin, reference))
    same_parameters(module.parameters(), twin.parameters())


def test_added_groups(pair):
    optimizer, module, reference, twin = pair
    train(module, optimizer, [0])
    train(twin, reference, [0])
    torch.manual_seed(1)
    more, its_twin = nn.Linear(20, 20), nn.Linear(20, 20)
    its_twin.load_state_dict(more.state_dict())
    for one, layer in ((optimizer, more), (reference, its_twin)):
        one.add_param_group({"params": list(layer.parameters()), "lr": 0.5})
    for step in range(1, 4):
        train(nn.Sequential(module, more), optimizer, [step])
        train(nn.Sequential(twin, its_twin), reference, [step])
    same_parameters(more.parameters(), its_twin.parameters())
    same_parameters(module.parameters(), twin.parameters())
    same_state(optimizer, reference)
    with pytest.raises(CapacityError):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(200, 300))]})
    with pytest.raises(ValueError, match="more than one"):
        optimizer.add_param_group({"params": [next(module.parameters())]})
    assert len(optimizer.param_groups) == 2
    train(nn.Sequential(module, more), optimizer, [5])


def test_named_parameters(tmp_path):
    ours, theirs = model(), model()
    reference = AdamW(theirs.named_parameters())
    with spilled(AdamW, ours.named_parameters(), tmp_path) as optimizer:
        train(ours, optimizer, range(2))
        train(theirs, reference, range(2))
        same_parameters(ours.parameters(), theirs.parameters())
        same_state(optimizer, reference)
        assert optimizer.param_groups[0]["param_names"][0] == "0.weight"


def test_frozen_parameters_and_those_without_gradients(pair):
    optimizer, module, reference, twin = pair
    for step in range(4):
        for one, net in ((optimizer, module), (reference, twin)):
            for number, parameter in enumerate(net.parameters()):
                parameter.requires_grad_((number + step) % 3 > 0)
            train(net, one, [step])
    same_parameters(module.parameters(), twin.parameters())
    same_state(optimizer, reference)


# -- state -------------------------------------------------------------------------------------


def test_state_to_and_from_the_wrapped_optimizer(pair, tmp_path):
    optimizer, module, reference, twin = pair
    train(module, optimizer, range(3))
    train(twin, reference, range(3))
    other, its_twin = copy.deepcopy(module), copy.deepcopy(module)
    fresh = AdamW(other.parameters(), lr=1)
    fresh.load_state_dict(optimizer.state_dict())
    same_state(optimizer, fresh)
    with spilled(AdamW, its_twin.parameters(), tmp_path / "2", budget="448KiB") as second:
        second.load_state_dict(reference.state_dict())
        same_state(second, reference)
        for net, one in ((module, optimizer), (other, fresh), (its_twin, second)):
            train(net, one, range(3, 6))
        same_parameters(module.parameters(), other.parameters())
        same_parameters(module.parameters(), its_twin.parameters())


def test_state_through_a_file(pair):
    optimizer, module, *_ = pair
    train(module, optimizer, range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    assert set(found["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    twin = AdamW(model().parameters())
    twin.load_state_dict(found)
    same_state(optimizer, twin)


def test_what_is_loaded_is_not_taken_away(pair):
    optimizer, module, reference, twin = pair
    train(twin, reference, [0])
    train(module, optimizer, [0])
    state = reference.state_dict()
    before = copy.deepcopy(state)
    optimizer.load_state_dict(state)
    train(module, optimizer, [1])
    for number, values in before["state"].items():
        for key, value in values.items():
            assert torch.equal(state["state"][number][key], value)


def test_loading_again_and_again_takes_no_more_room(pair):
    optimizer, module, *_ = pair
    train(module, optimizer, range(2))
    for _ in range(4):
        optimizer.load_state_dict(optimizer.state_dict())
        statistics = optimizer.statistics()
        assert statistics.swapper.file.names == statistics.tensors
        check(optimizer)


def test_state_of_other_parameters_is_refused(pair):
    optimizer, module, *_ = pair
    train(module, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ValueError, match="size"):
        optimizer.load_state_dict(AdamW([nn.Parameter(torch.zeros(2))]).state_dict())
    after = optimizer.state_dict()
    assert torch.equal(after["state"][3]["exp_avg"], before["state"][3]["exp_avg"])
    train(module, optimizer, [1])


def test_state_reads_when_it_is_asked(pair):
    optimizer, module, *_ = pair
    assert not optimizer.state
    assert dict(optimizer.state[next(module.parameters())]) == {}
    train(module, optimizer, range(2))
    optimizer.flush()
    weight = module[3].weight
    state = optimizer.state[weight]
    assert len(optimizer.state) == 9
    assert weight in optimizer.state
    assert list(state) == ["step", "exp_avg", "exp_avg_sq"]
    reads = optimizer.statistics().swapper.file.gets
    assert "exp_avg" in state
    assert optimizer.statistics().swapper.file.gets == reads
    assert state.get("nothing") is None
    first = state["exp_avg"]
    first.zero_()  # is a copy
    assert state["exp_avg"].abs().sum() > 0
    assert optimizer.statistics().swapper.file.gets == reads + 2
    with pytest.raises(UnsupportedError):
        state["exp_avg"] = first
    assert torch.equal(copy.deepcopy(state)["exp_avg"], state["exp_avg"])
    assert state.copy().keys() == {"step", "exp_avg", "exp_avg_sq"}


def test_sources(pair):
    optimizer, module, *_ = pair
    train(module, optimizer, range(2))
    source = optimizer.streaming_state_dict()["state"][2]["exp_avg"]
    expected = optimizer.state_dict()["state"][2]["exp_avg"]
    assert tuple(source.shape) == tuple(expected.shape)
    for _ in range(2):  # it can be gone through again
        parts = [torch.empty(n, dtype=source.dtype) for n in (100, 1000, expected.numel() - 1100)]
        start = 0
        for part in parts:
            source.fill(start, part)
            start += part.numel()
        assert torch.equal(torch.cat(parts), expected.flatten())
    assert expected.ndim == 2
    some = source.rows(Box((10, 0), (5, expected.shape[1])))
    rows = torch.empty(some.shape)
    some.fill(0, rows.view(-1))
    assert torch.equal(rows, expected[10:15])


# -- memory and the drive ----------------------------------------------------------------------


def test_little_is_moved_twice(tmp_path):
    """What is in memory at the end of a step is what the next one begins with."""
    parameters = [nn.Parameter(torch.randn(4096)) for _ in range(24)]
    with spilled(torch.optim.SGD, parameters, tmp_path, budget="256KiB", momentum=0.9) as optimizer:
        for _ in range(6):
            before = optimizer.statistics()
            for parameter in parameters:
                parameter.grad = torch.randn(4096)
            optimizer.step()
            optimizer.state_tensors.store.collect(wait=True)
        after = optimizer.statistics()
        assert after.portions == 24
        assert after.state_bytes == 24 * 16384
        assert after.bytes_out - before.bytes_out == after.state_bytes
        kept = after.state_bytes - (after.bytes_in - before.bytes_in)
        assert kept >= optimizer.state_tensors.swapper.budget // 2
        assert after.peak_bytes <= after.budget_bytes


def test_the_smallest_budget(tmp_path):
    parameters = [nn.Parameter(torch.randn(n)) for n in (1000, 9000, 500)]
    with pytest.raises(CapacityError) as caught:
        SpilledOptimizer(AdamW, parameters, folder=tmp_path, budget="64KiB", min_bytes=0)
    assert caught.value.asked
    smallest = str(caught.value.asked)
    assert smallest in str(caught.value)
    assert not any(tmp_path.rglob("*.spill"))
    with spilled(AdamW, parameters, tmp_path, budget=int(smallest)) as optimizer:
        for _ in range(3):
            for parameter in parameters:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()


def test_small_tensors_stay_in_memory(tmp_path):
    ours, theirs = model(), model()
    reference = AdamW(theirs.parameters())
    with spilled(AdamW, ours.parameters(), tmp_path, min_bytes="4KiB") as optimizer:
        train(ours, optimizer, range(3))
        train(theirs, reference, range(3))
        same_state(optimizer, reference)
        statistics = optimizer.statistics()
        assert statistics.tensors == 4
        assert 0 < statistics.memory_bytes < statistics.state_bytes


def test_no_gradients_no_step(pair):
    optimizer, module, *_ = pair
    optimizer.step()
    assert not optimizer.state
    train(module, optimizer, [0])


# -- what is refused, and the end --------------------------------------------------------------


class Custom(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (torch.optim.LBFGS, {}),
        (Custom, {}),
        (torch.optim.Optimizer, {}),
        (dict, {}),
        (AdamW, {"differentiable": True}),
        (AdamW, {"backend": "tape"}),
        (AdamW, {"engine": {"colour": "red"}}),
    ],
)
def test_what_is_refused(cls, options, tmp_path):
    with pytest.raises(UnsupportedError):
        SpilledOptimizer(cls, [nn.Parameter(torch.zeros(4))], folder=tmp_path, **options)
    assert not any(tmp_path.rglob("*.spill"))


def test_bad_parameters(tmp_path):
    good = nn.Parameter(torch.zeros(2))
    for wrong in ([], [torch.zeros(2) + good]):
        with pytest.raises(ValueError, match=r"empty|leaf"):
            SpilledOptimizer(AdamW, wrong, folder=tmp_path)
    with pytest.raises(TypeError):
        SpilledOptimizer(AdamW, ["a"], folder=tmp_path)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        SpilledOptimizer(AdamW, [good], folder=tmp_path, colour="red")
    with pytest.raises(UnsupportedError, match="several devices"):
        SpilledOptimizer(
            AdamW, [good, nn.Parameter(torch.zeros(2, device="meta"))], folder=tmp_path
        )
    assert not any(tmp_path.rglob("*.spill"))


def test_a_class_of_the_users_own(tmp_path):
    parameter = nn.Parameter(torch.zeros(4))
    with SpilledOptimizer(Custom, [parameter], folder=tmp_path, separable=True, lr=0.1) as one:
        parameter.grad = torch.ones(4)
        one.step()
    assert torch.equal(parameter, torch.full((4,), -0.1))


@pytest.mark.parametrize("refused", [copy.deepcopy, pickle.dumps])
def test_copies_are_refused(refused, pair):
    with pytest.raises(UnsupportedError, match="state_dict"):
        refused(pair[0])


def test_closing(tmp_path):
    net = model()
    optimizer = SpilledOptimizer(AdamW, net.parameters(), folder=tmp_path, min_bytes=0)
    train(net, optimizer, range(2))
    optimizer.close()
    optimizer.close()
    assert not any(tmp_path.rglob("*.spill"))
    backward(net, 3)
    for refused in (optimizer.step, optimizer.state_dict, optimizer.flush):
        with pytest.raises(ClosedError):
            refused()
    with pytest.raises(ClosedError):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.statistics().steps == 2


def test_dropped_without_closing(tmp_path):
    net = model()
    optimizer = SpilledOptimizer(AdamW, net.parameters(), folder=tmp_path, min_bytes=0)
    train(net, optimizer, range(2))
    del optimizer
    gc.collect()
    assert not any(tmp_path.rglob("*.spill"))


def test_two_on_one_folder(tmp_path):
    pairs = []
    for seed in range(2):
        net = model(seed)
        pairs.append((net, SpilledOptimizer(AdamW, net.parameters(), folder=tmp_path, min_bytes=0)))
    for step in range(3):
        for net, optimizer in pairs:
            train(net, optimizer, [step])
    for seed, (net, optimizer) in enumerate(pairs):
        twin = model(seed)
        train(twin, AdamW(twin.parameters()), range(3))
        same_parameters(net.parameters(), twin.parameters())
        optimizer.close()


def test_a_forked_child_keeps_off(pair):
    optimizer, module, *_ = pair
    train(module, optimizer, range(2))
    pid = os.fork()
    if pid == 0:
        try:
            train(module, optimizer, [2])
        except ClosedError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    train(module, optimizer, [2])


@pytest.mark.thorough
def test_importing_is_cheap():
    program = (
        "import sys, threading, tensorspill.optimizer\n"
        "assert 'numba' not in sys.modules and threading.active_count() == 1\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
