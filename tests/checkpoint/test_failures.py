"""Ranks that die, hang or fill their drive in the middle of a save."""

import os
import random
import signal
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tensorspill import checkpoint
from tensorspill.checkpoint import Limits
from tensorspill.errors import (
    BrokenError,
    BusyError,
    NoSpaceError,
    OutcomeUnknownError,
    RankFailedError,
    SpillError,
)
from tests.checkpoint import models
from tests.checkpoint.ranks import connect, job, run, store_server, wait_for
from tests.faults.child import ChildError, start_child
from tests.faults.file_systems import small_file_system

pytestmark = pytest.mark.usefixtures("preloaded")

SIZE = 3
#: Long enough that on a busy machine no rank looks lost that is not.
TIMEOUT = 3.0
LIMITS = Limits(min_chunk=4096)


def state_of(number: int, nbytes: int = 1 << 20) -> dict[str, Any]:
    """Return a state that is equal on all ranks; every tensor tells its number."""
    return {
        "number": number,
        **{f"t{i}": torch.full((nbytes // 4,), float(number + i)) for i in range(3)},
    }


def check(folder: Path, numbers: set[int]) -> int:
    """Check that the latest checkpoint is whole and one of these; return its number."""
    state = state_of(-10)
    checkpoint.load(state, folder)
    number = int(state["number"])
    assert number in numbers
    for name, value in state_of(number).items():
        assert name == "number" or torch.equal(state[name], value)
    return number


def save(folder: Path, number: int, **options: Any) -> checkpoint.SaveRecord:
    return checkpoint.save(
        state_of(number),
        folder,
        **{"replicated": ["t*"], "limits": LIMITS, "timeout": TIMEOUT, **options},
    )


def outcome(folder: Path, number: int, **options: Any) -> tuple[Any, float]:
    """Save; return the path or the error, and the seconds."""
    begun = time.monotonic()
    try:
        found: Any = save(folder, number, **options).path
    except SpillError as error:
        found = error
    return found, time.monotonic() - begun


# -- killed at any moment ------------------------------------------------------------------------


def save_until_killed(rank: int, folder: Path, begun: Path) -> Any:
    save(folder, 1, timeout=60)  # the first one takes longer: ranks come together
    (begun / str(rank)).touch()
    number = 2
    while True:
        found, seconds = outcome(folder, number)
        if isinstance(found, SpillError):
            return found, seconds
        number += 1


class Trial:
    """A job of which one rank is killed."""

    def __init__(self, number: int, root: Path, stack: ExitStack) -> None:
        self.folder, self.begun = root / f"checkpoints{number}", root / f"begun{number}"
        self.begun.mkdir()
        self.chance = random.Random(number)
        self.victim = self.chance.randrange(SIZE)
        self.job = stack.enter_context(job(SIZE, save_until_killed, self.folder, self.begun))

    def kill(self) -> None:
        """Kill the victim at a random moment of a save."""
        wait_for(lambda: len(list(self.begun.iterdir())) == SIZE, 60)
        time.sleep(self.chance.random() * 0.1)
        os.kill(self.job.children[self.victim].pid, signal.SIGKILL)

    def check(self) -> None:
        """Check what survivors were told, and what they left."""
        found = [
            child.result() for rank, child in enumerate(self.job.children) if rank != self.victim
        ]
        self.job.children[self.victim].kill()
        errors = [error for error, _ in found]
        assert {type(error) for error in errors} in ({RankFailedError}, {OutcomeUnknownError})
        assert len({str(error) for error in errors}) == 1
        assert len({error.ranks for error in errors}) == 1
        latest = check(self.folder, set(range(1, 10_000)))
        # What is left does not disturb the next save.
        save(self.folder, latest + 1, timeout=60)
        check(self.folder, {latest + 1})
        assert not list(self.folder.glob("*.saving"))


@pytest.mark.parametrize(
    "batch", [0, *(pytest.param(batch, marks=pytest.mark.thorough) for batch in range(1, 5))]
)
def test_whoever_is_killed_at_any_moment_leaves_a_checkpoint(tmp_path, batch):
    """50 trials; ten at a time, as most of their time they wait."""
    with ExitStack() as stack:
        trials = [Trial(10 * batch + number, tmp_path, stack) for number in range(10)]
        for trial in trials:
            trial.kill()
        for trial in trials:
            trial.check()


# -- at chosen moments ---------------------------------------------------------------------------


def test_a_rank_that_does_not_come_fails_the_save(tmp_path):
    def act(rank: int) -> Any:
        save(tmp_path, 1)
        if rank == 1:
            time.sleep(600)
        return outcome(tmp_path, 2)

    with job(SIZE, act) as ranks:
        found = [ranks.children[rank].result() for rank in (0, 2)]
        ranks.children[1].kill()
    for error, seconds in found:
        assert type(error) is RankFailedError
        assert error.ranks == (1,)
        assert seconds < TIMEOUT + 10
    check(tmp_path, {1})


def test_a_rank_that_comes_late_is_waited_for(tmp_path):
    def act(rank: int) -> Any:
        save(tmp_path, 1)
        if rank == 1:
            time.sleep(TIMEOUT / 2)
        return save(tmp_path, 2).step

    assert run(SIZE, act) == [1] * SIZE
    check(tmp_path, {2})


@pytest.mark.thorough
def test_a_slow_writer_is_waited_for(tmp_path, monkeypatch):
    def act(rank: int) -> Any:
        from tensorspill.checkpoint.distributed import board

        save(tmp_path, 1)
        if rank == 1:
            advance = board.Board.advance

            def slowly(self: board.Board, nbytes: int = 0) -> None:
                time.sleep(TIMEOUT / 4)
                advance(self, nbytes)

            vars(board)["Board"].advance = slowly
        begun = time.monotonic()
        checkpoint.save(
            state_of(2, 64 << 20), tmp_path, replicated=["t*"], limits=LIMITS, timeout=TIMEOUT
        )
        return time.monotonic() - begun

    assert min(run(2, act)) > TIMEOUT / 4


def test_a_full_drive_at_one_rank_is_everybodys_error(tmp_path):
    with small_file_system(tmp_path, 24 << 20) as folder:

        def act(rank: int) -> Any:
            save(folder, 1)
            try:
                checkpoint.save(state_of(2, 12 << 20), folder, replicated=["t*"], timeout=30)
            except SpillError as error:
                full = error
            # It goes on, as soon as there is room.
            return full, save(folder, 3).step

        found = run(SIZE, act)
        assert {type(error) for error, _ in found} == {NoSpaceError}
        assert len({str(error) for error, _ in found}) == 1
        assert [step for _, step in found] == [1] * SIZE
        check(folder, {3})


def test_an_error_of_one_ranks_own_is_everybodys(tmp_path):
    def act(rank: int) -> Any:
        save(tmp_path, 1)
        state = state_of(2) | ({"x": lambda: None} if rank == 1 else {"x": 5})
        errors = []
        try:
            checkpoint.save(state | {"only": rank == 1}, tmp_path, timeout=30)
        except SpillError as error:
            errors.append(error)
        # Rank 0 keeps objects; what rank 1 alone keeps fails there.
        if rank == 1:
            state[f"of-{rank}"] = lambda: None
        try:
            checkpoint.save(state, tmp_path, timeout=30)
        except SpillError as error:
            errors.append(error)
        return errors

    found = run(2, act)
    assert [str(errors[-1]) for errors in found] == [str(found[0][-1])] * 2
    assert found[0][-1].ranks == (1,)


def test_the_failed_rank_can_be_excluded(tmp_path):
    def act(rank: int) -> Any:
        from tensorspill.checkpoint.distributed import attempt

        write_file = vars(attempt)["write_file"]

        def broken(*arguments: Any, **options: Any) -> Any:
            raise BrokenError("The drive of this rank is gone", path="/dev/null")

        if rank == 1:
            vars(attempt)["write_file"] = broken
        try:
            save(tmp_path, 1)
        except BrokenError as error:
            exclude = tuple(f"rank{r}" for r in error.ranks)
        limits = Limits(min_chunk=4096, exclude=exclude)
        record = save(tmp_path, 2, limits=limits)
        vars(attempt)["write_file"] = write_file
        return exclude, record.shares

    found = run(SIZE, act)
    assert all(exclude == ("rank1",) for exclude, _ in found)
    assert len({shares for _, shares in found}) == 1
    assert found[0][1][1] == 0
    assert min(found[0][1][0], found[0][1][2]) > 1 << 20
    check(tmp_path, {2})


def test_two_jobs_in_one_folder(tmp_path):
    from tensorspill.checkpoint.files.commit import begin

    def hold() -> None:
        with begin(tmp_path, "other"):
            time.sleep(600)

    other = start_child(hold)
    wait_for(lambda: (tmp_path / "other.saving").exists())
    try:
        found = run(2, lambda _: outcome(tmp_path, 1)[0])
    finally:
        other.kill()
    assert {type(error) for error in found} == {BusyError}
    assert {error.ranks for error in found} == {(0,)}
    run(2, lambda _: save(tmp_path, 2).step)
    check(tmp_path, {2})


def test_ranks_that_save_differently_are_told(tmp_path):
    def act(rank: int) -> Any:
        return outcome(tmp_path, 1, step=rank)[0], outcome(tmp_path / str(rank), 1)[0]

    found = run(2, act)
    assert all("saves otherwise" in str(error) for pair in found for error in pair)
    assert len({str(first) for first, _ in found}) == 1


def test_rank_0_and_its_store_die_in_the_middle(tmp_path):
    """Without a launcher's store: what survivors raise then, and that they do so in time."""
    reading, writing = os.pipe()

    def act(rank: int) -> Any:
        import torch.distributed as dist

        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        if rank == 0:
            store = _serving(writing)
        else:
            port = int(os.read(reading, 5))
            store = connect(port)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=3)
        save(tmp_path, 1)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return outcome(tmp_path, 2)

    children = [start_child(partial(act, rank)) for rank in range(3)]
    with pytest.raises(ChildError):
        children[0].result()
    for error, seconds in (child.result() for child in children[1:]):
        assert type(error) is OutcomeUnknownError
        assert seconds < TIMEOUT + 10
    os.close(reading)
    os.close(writing)
    check(tmp_path, {1})


def _serving(writing: int) -> Any:
    from torch._C._distributed_c10d import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for _ in range(2):
        os.write(writing, f"{store.port:5}".encode())
    return store


# -- in the background ---------------------------------------------------------------------------


def test_a_rank_killed_during_an_asynchronous_save(tmp_path):
    def act(rank: int) -> Any:
        options: dict[str, Any] = {"replicated": ["t*"], "limits": LIMITS, "timeout": TIMEOUT}
        checkpoint.async_save(state_of(1), tmp_path, **options).result()
        saving = checkpoint.async_save(state_of(2), tmp_path, **options)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            return saving.result().path
        except SpillError as error:
            return error

    with job(SIZE, act) as ranks:
        found = [ranks.children[rank].result() for rank in (0, 1)]
        ranks.children[2].kill()
    kinds = {type(error) for error in found}
    # Rank 2 may have written everything before.
    assert kinds in ({RankFailedError}, {str}), found
    check(tmp_path, {1, 2})


@pytest.mark.thorough
def test_an_error_in_the_background_is_raised_by_the_next_save_of_all(tmp_path):
    with small_file_system(tmp_path, 24 << 20) as folder:

        def act(rank: int) -> Any:
            save(folder, 1)
            saving = checkpoint.async_save(state_of(2, 12 << 20), folder, replicated=["t*"])
            saving.wait()
            seen = saving.exception() if rank == 1 else None
            try:
                save(folder, 3)
            except SpillError as error:
                return seen, error, save(folder, 4).step
            return None

        found = run(2, act)
        assert {type(error) for _, error, _ in found} == {NoSpaceError}
        assert len({str(error) for _, error, _ in found}) == 1
        assert type(found[1][0]) is NoSpaceError
        check(folder, {4})


@pytest.mark.thorough
def test_models_go_on_after_a_failed_save(tmp_path):
    """The whole of it: training, a save that fails, training on, a save, and back."""

    def act(rank: int) -> Any:
        model, optimizer = models.build("ddp")
        models.losses(model, optimizer, range(2))
        state = models.state_of(model, optimizer)
        bad = state | {f"bad{rank}": (lambda: None) if rank == 1 else 1}
        with pytest.raises(SpillError):
            checkpoint.save(bad, tmp_path, timeout=30)
        checkpoint.save(state, tmp_path, timeout=30)
        first = models.losses(model, optimizer, range(2, 4))
        model, optimizer = models.build("ddp")
        state = models.state_of(model, optimizer)
        checkpoint.load(state, tmp_path)
        models.set_state(model, optimizer, state)
        return first == models.losses(model, optimizer, range(2, 4))

    assert run(2, act) == [True, True]


def test_the_store_is_not_needed_to_load(tmp_path):
    with store_server():
        run(2, lambda _: save(tmp_path, 1).step)
    check(tmp_path, {1})
