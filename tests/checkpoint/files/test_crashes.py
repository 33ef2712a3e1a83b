"""Killed at any moment: the checkpoint before stays whole and the latest, or the new one is."""

import os
import random
import signal
import sys
import time

import pytest

from tensorspill.checkpoint.files.commit import begin, latest, prune, sweep
from tensorspill.checkpoint.tools.listing import list_checkpoints
from tests.checkpoint.files.helpers import fresh, holds, save, write
from tests.faults.child import Child, start_child

#: Audit events of all that changes names: `open` makes files.
STEPS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "open"}


def state():
    return {"a": fresh((500, 1024)), "b": fresh((37,)), "c": fresh((300, 500)).t()}


class Root:
    """A root to which one save after the other is killed."""

    def __init__(self, path):
        self.path = path
        self.contents = {}
        for step in range(2):
            # The second leaves recycled extents for those that follow.
            self.begin(f"s{step}").result()
        self.last = "s1"

    def begin(self, name, prepare=lambda: None) -> Child:
        """Start a save in a child that has everything loaded."""
        content = self.contents[name] = state()

        def run():
            prepare()
            save(self.path, name, content, {"o": b"text"}, writers=2, keep=1)

        return start_child(run)

    def check(self, name):
        """Whatever happened to the save `name`, some checkpoint is whole and the latest."""
        found = os.path.basename(latest(self.path) or "")
        assert found in (self.last, name)
        assert holds(self.path / found, self.contents[found])
        for entry in list_checkpoints(self.path).checkpoints:
            # One that is not yet the latest, or not yet removed, is whole as well.
            assert holds(self.path / entry.name, self.contents[entry.name])
        self.last = found
        # As the next save would; its own steps should be the same each time.
        sweep(self.path)
        prune(self.path, 1)
        return found == name


@pytest.fixture
def root(tmp_path):
    save(tmp_path / "warm", "up", state())  # compiled kernels, for the children
    return Root(tmp_path / "root")


def killed(child):
    """Kill it, unless it is gone."""
    try:
        child.kill()
    except ProcessLookupError:
        os.waitpid(child.pid, 0)


@pytest.mark.thorough  # the next one tries every step of a commit
def test_killed_at_fifty_random_moments(root):
    started = time.perf_counter()
    root.begin("timed").result()
    duration = time.perf_counter() - started
    root.last = "timed"
    for trial in range(50):
        child = root.begin(f"t{trial}")
        time.sleep(random.uniform(0.05, 1.1) * duration)
        killed(child)
        root.check(f"t{trial}")
    content = state()
    save(root.path, "after", content, keep=1)
    assert holds(root.path / "after", content)
    assert {path.name for path in root.path.iterdir()} == {
        "after", "latest", ".tensorspill-recycled", ".tensorspill-checkpoint",
    }  # fmt: skip


def test_killed_before_every_step(root):
    """Kill the child before its first, second, third … change of a name, until it gets through."""
    committed = []
    for step in range(200):

        def die_at(step=step):
            left = [step]

            def hook(event, _arguments):
                if event in STEPS:
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(hook)

        child = root.begin(f"n{step}", die_at)
        done = False
        try:
            child.result()
            done = True
        except AssertionError:
            pass  # killed, as it should be
        committed.append(root.check(f"n{step}"))
        if done:
            break
    assert done
    assert committed[-1]
    # The first steps are before the rename, the last ones after.
    assert committed == sorted(committed)
    assert committed.count(True) > 2


def test_leftovers_are_left_to_the_next_save(tmp_path):
    content = state()
    path = save(tmp_path, "a", content)

    def die():
        pending = begin(tmp_path, "b")
        write(pending, state())
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(AssertionError):
        start_child(die).result()
    assert (tmp_path / "b.saving").exists()
    assert latest(tmp_path) == path
    assert holds(path, content)
    assert (tmp_path / "b.saving").exists()
    save(tmp_path, "c", content)
    assert not (tmp_path / "b.saving").exists()
