"""A drive that fails, or a Ctrl-C, in the middle of a backward that steps parameters."""

import contextlib
import errno
import os
import signal
import threading

import pytest
import torch
from torch import nn

from tensorspill.errors import BrokenError, NoSpaceError
from tensorspill.optimizer import SpilledOptimizer
from tensorspill.training import offload, offloaded
from tests.faults import Rule, faulty_file_system, small_file_system
from tests.optimizer.helpers import check, same_parameters, same_state, spilled
from tests.optimizer.test_faults import COUNT, fresh, parameters, with_gradients

OPTIONS = {"budget": "384KiB", "capacity": "4MiB", "lr": 0.1, "in_backward": True}


class Twins:
    """An optimizer that steps in backward, and one in memory that gets the same gradients."""

    def __init__(self, optimizer, ours):
        self.optimizer, self.ours, self.theirs = optimizer, ours, parameters()
        self.reference = torch.optim.AdamW(self.theirs, lr=0.1)
        self.steps = 0

    def backward(self):
        """Give each parameter the gradient of `with_gradients`, one after the other."""
        self.steps += 1
        self.optimizer.zero_grad()
        seed = 100 * self.steps + 50
        loss = sum((p * fresh(seed + number)).sum() for number, p in enumerate(self.ours))
        assert isinstance(loss, torch.Tensor)
        loss.backward()

    def step(self):
        self.backward()
        self.optimizer.step()
        self.follow()

    def counts(self):
        """Return how many steps each parameter has, by its state."""
        return [int(self.optimizer.state[p].get("step", 0)) for p in self.ours]

    def follow(self):
        """Make the reference's step, for the parameters of which ours was made."""
        with_gradients(self.theirs, self.steps)
        done = 0
        for mine, other in zip(self.ours, self.theirs, strict=True):
            before = self.reference.state[other].get("step", 0)
            count = self.optimizer.state[mine].get("step", 0)
            assert count in (before, before + 1)
            done += int(count != before)
            if count == before:
                other.grad = None
        self.reference.step()
        same_parameters(self.ours, self.theirs)
        same_state(self.optimizer, self.reference)
        return done


@pytest.fixture
def drive(tmp_path):
    with faulty_file_system(tmp_path) as files:
        yield files


@pytest.fixture
def twins(drive):
    ours = parameters()
    with spilled(torch.optim.AdamW, ours, drive.folder, **OPTIONS) as optimizer:
        pair = Twins(optimizer, ours)
        for _ in range(3):
            pair.step()
        assert optimizer.statistics().portions == COUNT
        optimizer.state_tensors.store.collect(wait=True)  # what fails now is of the next step
        yield pair


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_drive_that_fails_in_the_middle_of_backward(op, code, drive, twins):
    """Each parameter is whole; the step can be ended for those whose gradients had come."""
    drive.rules(Rule("*.spill", op, error=code))
    with pytest.raises(BrokenError) as caught:
        twins.backward()
    assert caught.value.errno == code
    drive.rules()
    waiting = [type(p.grad) is torch.Tensor for p in twins.ours]
    before = twins.counts()
    twins.optimizer.step()
    after = twins.counts()
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(w) for w in waiting]
    assert 0 < twins.follow() < COUNT
    for _ in range(2):
        twins.step()
    twins.optimizer.flush()
    check(twins.optimizer)


def test_a_drive_that_goes_on_failing(drive, twins):
    drive.rules(Rule("*.spill", "write", error=errno.EIO))
    with pytest.raises(BrokenError):
        twins.backward()
    with contextlib.suppress(BrokenError):  # of a write, which one may not be told of yet
        twins.optimizer.step()
    for _ in range(2):
        with pytest.raises(BrokenError):
            twins.optimizer.flush()
    assert twins.optimizer.statistics().peak_bytes <= twins.optimizer.statistics().budget_bytes
    drive.rules()
    twins.optimizer.finish_step()
    assert twins.follow() < COUNT
    twins.step()


def test_gradients_of_a_backward_that_failed_can_be_dropped(drive, twins):
    drive.rules(Rule("*.spill", "read", error=errno.EIO))
    with pytest.raises(BrokenError):
        twins.backward()
    drive.rules()
    assert 0 < twins.follow() < COUNT
    twins.step()


def test_a_full_drive(tmp_path):
    """State that a step in backward makes, and can't be stored, is in memory."""
    with small_file_system(tmp_path, 2 << 20) as folder:
        many = [nn.Parameter(torch.zeros(40_000)) for _ in range(24)]
        with SpilledOptimizer(
            torch.optim.AdamW, many, folder=folder, budget="2MiB", min_bytes=0, in_backward=True
        ) as optimizer:
            sum(p.sum() for p in many).backward()  # type: ignore[union-attr]
            with pytest.raises(NoSpaceError):
                optimizer.step()
            done = [p for p in many if "step" in optimizer.state[p]]
            assert 0 < len(done) < 24
            assert all(optimizer.state[p]["exp_avg"].ne(0).all() for p in done)


class Chain(nn.Module):
    """Layers of one size, whose parameters and gradients are on the drive as well."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))

    def forward(self, x):
        for block in self.blocks:
            x = block(x).tanh()
        return x


@pytest.mark.parametrize("op", ["read", "write"])
def test_an_offloaded_model(op, drive, tmp_path):
    """The parameters' own drive fails: each has its value and state of the same step."""
    ours, theirs = Chain(), Chain()
    offload(ours, drive.folder, "64KiB", min_bytes=0, blocks=list(ours.blocks), gradients="spilled")
    reference = torch.optim.AdamW(theirs.parameters(), lr=0.1)

    def backward(net, step):
        net.zero_grad()
        data = torch.randn(4, 64, generator=torch.Generator().manual_seed(step))
        net(data).square().mean().backward()

    options = {"budget": "128KiB", "lr": 0.1, "in_backward": True}
    with spilled(torch.optim.AdamW, ours.parameters(), tmp_path / "state", **options) as optimizer:
        for step in range(3):
            for net, one in ((ours, optimizer), (theirs, reference)):
                backward(net, step)
                one.step()
        store = offloaded(ours).residency._memory.store
        store.collect(wait=True)
        optimizer.zero_grad()
        loss = ours(torch.ones(4, 64)).square().mean()
        drive.rules(Rule("*.spill", op, error=errno.EIO))
        with pytest.raises(BrokenError):
            loss.backward()
        drive.rules()
        with contextlib.suppress(BrokenError):  # of another write that failed meanwhile
            store.collect(wait=True)
        counts = [int(optimizer.state[p]["step"]) for p in ours.parameters()]
        assert set(counts) == {3, 4}
        reference.zero_grad()
        theirs(torch.ones(4, 64)).square().mean().backward()
        for other, count in zip(theirs.parameters(), counts, strict=True):
            other.grad = None if count == 3 else other.grad
        reference.step()
        for step in range(4, 6):
            for net, one in ((ours, optimizer), (theirs, reference)):
                backward(net, step)
                one.step()
        same_state(optimizer, reference)
    offloaded(ours).close(restore=True)
    same_parameters(ours.parameters(), theirs.parameters())


def test_interrupted_anywhere(tmp_path):
    """Ctrl-C at random moments: each parameter has all of a step or nothing, and it goes on."""
    ours = parameters()
    with spilled(torch.optim.AdamW, ours, tmp_path, **OPTIONS) as optimizer:
        pair = Twins(optimizer, ours)
        pair.step()
        interrupted = 0
        for delay in range(0, 60, 2):
            timer = threading.Timer(delay / 4000, lambda: os.kill(os.getpid(), signal.SIGINT))
            try:
                timer.start()
                pair.backward()
                optimizer.step()
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            timer.cancel()
            timer.join()
            optimizer.finish_step()
            pair.follow()
        assert interrupted
        pair.step()
