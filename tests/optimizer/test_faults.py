"""A drive that fails, fills up or is interrupted in the middle of a step."""

import errno
import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from tensorspill.errors import BrokenError, CapacityError, CorruptError, NoSpaceError
from tensorspill.optimizer import SpilledOptimizer
from tests.faults import Rule, faulty_file_system, small_file_system
from tests.optimizer.helpers import check, same_parameters, same_state, spilled

COUNT, SIZE = 12, 8192


def parameters():
    return [nn.Parameter(fresh(number)) for number in range(COUNT)]


def fresh(seed):
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(seed))


def with_gradients(some, step):
    for number, parameter in enumerate(some):
        parameter.grad = fresh(100 * step + number + 50)


class Twins:
    """A spilled optimizer, and one in memory that is stepped after it."""

    def __init__(self, optimizer, ours):
        self.optimizer, self.ours, self.theirs = optimizer, ours, parameters()
        self.reference = torch.optim.AdamW(self.theirs, lr=0.1)
        self.steps = 0

    def gradients(self):
        self.steps += 1
        with_gradients(self.ours, self.steps)
        with_gradients(self.theirs, self.steps)
        self.reference.step()

    def step(self):
        self.gradients()
        self.optimizer.step()

    def check(self):
        same_parameters(self.ours, self.theirs)
        same_state(self.optimizer, self.reference)

    def whole(self, before):
        """Check that each parameter has all of the step or nothing; return how many have it."""
        done = 0
        for number, parameter in enumerate(self.ours):
            new, step = self.theirs[number], self.optimizer.state[parameter]["step"]
            if torch.equal(parameter, new):
                done += 1
                expected = self.reference.state[new]
                for key in ("step", "exp_avg", "exp_avg_sq"):
                    assert torch.equal(self.optimizer.state[parameter][key], expected[key])
            else:
                assert torch.equal(parameter, before[number])
                assert step == self.steps - 1
        return done


@pytest.fixture
def drive(tmp_path):
    with faulty_file_system(tmp_path) as files:
        yield files


@pytest.fixture
def twins(drive):
    ours = parameters()
    options = {"budget": "384KiB", "capacity": "4MiB", "lr": 0.1}
    with spilled(torch.optim.AdamW, ours, drive.folder, **options) as optimizer:
        pair = Twins(optimizer, ours)
        pair.step()
        pair.step()
        assert optimizer.statistics().portions > 4
        optimizer.state_tensors.store.collect(wait=True)  # what fails now is of the next step
        yield pair


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("op", ["read", "write"])
def test_a_step_that_fails_in_the_middle_can_be_finished(op, code, drive, twins):
    before = [parameter.detach().clone() for parameter in twins.ours]
    twins.gradients()
    drive.rules(Rule("*.spill", op, error=code))
    with pytest.raises(BrokenError) as caught:
        twins.optimizer.step()
    assert caught.value.errno == code
    assert str(caught.value.path).endswith(".spill")
    drive.rules()
    done = twins.whole(before)
    assert 0 < done < COUNT
    twins.optimizer.finish_step()
    twins.check()
    twins.optimizer.finish_step()  # nothing is left to do
    twins.check()
    twins.step()
    twins.optimizer.flush()
    twins.check()
    check(twins.optimizer)


def test_a_drive_that_goes_on_failing(drive, twins):
    """However often the step is tried, no value is lost."""
    before = [parameter.detach().clone() for parameter in twins.ours]
    twins.gradients()
    drive.rules(Rule("*.spill", "write", error=errno.EIO))
    for attempt in (twins.optimizer.step, *[twins.optimizer.finish_step] * 5):
        with pytest.raises(BrokenError):
            attempt()
    with pytest.raises(BrokenError):
        twins.optimizer.flush()
    twins.whole(before)
    assert twins.optimizer.statistics().peak_bytes <= twins.optimizer.statistics().budget_bytes
    drive.rules()
    twins.optimizer.finish_step()
    twins.optimizer.flush()
    twins.check()


def test_a_first_step_that_fails_keeps_the_new_state_in_memory(drive):
    ours = parameters()
    options = {"budget": "384KiB", "capacity": "4MiB", "lr": 0.1}
    with spilled(torch.optim.AdamW, ours, drive.folder, **options) as optimizer:
        pair = Twins(optimizer, ours)
        pair.gradients()
        drive.rules(Rule("*.spill", "write", error=errno.EIO))
        with pytest.raises(BrokenError):
            optimizer.step()
        assert optimizer.statistics().memory_bytes > 0
        drive.rules()
        optimizer.finish_step()
        pair.check()
        pair.step()
        pair.step()
        pair.check()
        assert optimizer.statistics().tensors == 2 * COUNT


def test_resumed_from_a_checkpoint(drive, twins, tmp_path):
    from tensorspill import checkpoint

    state = {"parameters": twins.ours, "optimizer": twins.optimizer}
    checkpoint.save(state, tmp_path / "checkpoints")
    twins.gradients()
    drive.rules(Rule("*.spill", "read", error=errno.EIO))
    with pytest.raises(BrokenError):
        twins.optimizer.step()
    resumed = parameters()
    options = {"budget": "384KiB", "lr": 0.5}
    with spilled(torch.optim.AdamW, resumed, tmp_path / "other", **options) as optimizer:
        checkpoint.load({"parameters": resumed, "optimizer": optimizer}, tmp_path / "checkpoints")
        with_gradients(resumed, twins.steps)
        optimizer.step()
        same_parameters(resumed, twins.theirs)
        same_state(optimizer, twins.reference)
    drive.rules()


def test_loading_that_fails_changes_nothing(drive, twins):
    other = torch.optim.AdamW(parameters())
    with_gradients(other.param_groups[0]["params"], 9)
    other.step()
    drive.rules(Rule("*.spill", "write", error=errno.EIO))
    with pytest.raises(BrokenError):
        twins.optimizer.load_state_dict(other.state_dict())
    drive.rules()
    twins.check()
    twins.step()
    twins.check()
    statistics = twins.optimizer.statistics()
    assert statistics.swapper.file.names == statistics.tensors == 2 * COUNT


def test_a_full_drive(tmp_path):
    with small_file_system(tmp_path, 2 << 20) as folder:
        many = [nn.Parameter(torch.zeros(40_000)) for _ in range(24)]
        options: dict[str, Any] = {"budget": "2MiB", "min_bytes": 0}
        with SpilledOptimizer(torch.optim.AdamW, many, folder=folder, **options) as optimizer:
            for parameter in many:
                parameter.grad = torch.ones(40_000)
            with pytest.raises(NoSpaceError) as caught:
                optimizer.step()
            assert str(folder) in str(caught.value.path)
            # What could not be stored is in memory; nothing is lost.
            steps = [optimizer.state[p].get("step") for p in many]
            done = sum(step is not None for step in steps)
            assert 0 < done < 24
            assert all(p.ne(0).all() for p in many[:done])
            assert all(p.eq(0).all() for p in many[done:])
            assert optimizer.state[many[done - 1]]["exp_avg"].ne(0).all()


def test_a_file_that_is_full(tmp_path):
    ours = parameters()
    with SpilledOptimizer(
        torch.optim.AdamW, ours, folder=tmp_path, budget="384KiB", min_bytes=0, capacity="256KiB"
    ) as optimizer:
        with_gradients(ours, 1)
        with pytest.raises(CapacityError):
            optimizer.step()


def test_bytes_that_changed_on_the_drive(tmp_path):
    ours = parameters()
    options: dict[str, Any] = {"budget": "384KiB", "min_bytes": 0, "verify": True}
    with SpilledOptimizer(torch.optim.AdamW, ours, folder=tmp_path, **options) as optimizer:
        with_gradients(ours, 1)
        optimizer.step()
        optimizer.flush()
        tensor = optimizer.raw_state(ours[5])["exp_avg"]
        path, offset, _ = optimizer.state_tensors.swapper.location(tensor)[0]
        with open(path, "r+b") as file:
            file.seek(offset + 77)
            file.write(b"\xff\xfe")
            os.fsync(file.fileno())
        with pytest.raises(CorruptError):
            optimizer.step()


def test_interrupted_anywhere(tmp_path):
    """Ctrl-C at random moments: each parameter has all of a step or nothing, and it goes on."""
    ours = parameters()
    with spilled(torch.optim.AdamW, ours, tmp_path, budget="384KiB", lr=0.1) as optimizer:
        pair = Twins(optimizer, ours)
        interrupted = 0
        for delay in range(0, 30, 2):
            timer = threading.Timer(delay / 4000, lambda: os.kill(os.getpid(), signal.SIGINT))
            pair.gradients()
            try:
                timer.start()
                optimizer.step()
                timer.join()
            except KeyboardInterrupt:
                interrupted += 1
            timer.cancel()
            timer.join()
            if optimizer._steps.unfinished:
                optimizer.finish_step()
            elif optimizer.statistics().steps < pair.steps:  # it had not begun
                optimizer.step()
        assert interrupted
        pair.check()
