"""The board on real stores: who is lost, who is slow, and what all survivors are told."""

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore

from tensorspill.checkpoint.distributed.board import Board
from tensorspill.checkpoint.distributed.wire import from_rank
from tensorspill.errors import NoSpaceError, OutcomeUnknownError, RankFailedError, SpillError
from tests.checkpoint.ranks import connect, store_server
from tests.faults.child import start_child

#: Long enough that a busy machine does not look like a lost rank.
TIMEOUT = 1.5

Act = Callable[[Board, int], Any]


def play(size: int, act: Act, lost: tuple[int, ...] = ()) -> list[Any]:
    """Let ranks act, each in a process; return what each returned or raised, None for lost ones."""
    with store_server() as (port, _):

        def work(rank: int) -> Any:
            store = PrefixStore("save", connect(port))
            with Board(store, rank, size, TIMEOUT) as board:
                try:
                    return act(board, rank)
                except SpillError as error:
                    return error

        children = [start_child(partial(work, rank)) for rank in range(size)]
        found = [None if rank in lost else child.result() for rank, child in enumerate(children)]
        for rank in lost:
            children[rank].kill()
        return found


def to_the_end(board: Board, rank: int) -> bytes:
    board.say("done", bytes([rank]))
    if rank == 0:
        said = board.hear_all("done")
        board.claim()
        board.conclude(b"".join(said))
    return board.outcome()


def same(errors: list[Any], kind: type[SpillError], ranks: tuple[int, ...]) -> None:
    """Check that all survivors were told the same."""
    survivors = [error for error in errors if error is not None]
    assert {type(error) for error in survivors} == {kind}
    assert {str(error) for error in survivors} == {str(survivors[0])}
    assert {error.ranks for error in survivors} == {ranks}


def test_all_hear_what_each_says():
    def act(board: Board, rank: int) -> Any:
        board.say("large", os.urandom(2_500_000) if rank == 1 else b"")
        large = board.hear("large", [1, 0])
        return len(large[0]), large[1], to_the_end(board, rank)

    assert play(3, act) == [(2_500_000, b"", b"\x00\x01\x02")] * 3


def test_nothing_is_left_in_the_store():
    store = HashStore()
    with Board(PrefixStore("save", store), 0, 1, TIMEOUT) as board:
        to_the_end(board, 0)
    assert store.num_keys() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("who", [1, 3])
def test_a_rank_that_is_lost_fails_the_save_for_all_alike(number, who):
    def act(board: Board, rank: int) -> Any:
        if rank == who:
            os.kill(os.getpid(), number)
        return to_the_end(board, rank)

    same(play(4, act, (who,)), RankFailedError, (who,))


def test_a_coordinator_lost_before_the_commit_fails_the_save():
    def act(board: Board, rank: int) -> Any:
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return to_the_end(board, rank)

    same(play(4, act, (0,)), RankFailedError, (0,))


def test_a_coordinator_lost_in_the_commit_leaves_the_outcome_unknown():
    def act(board: Board, rank: int) -> Any:
        board.say("done", b"")
        if rank == 0:
            board.hear_all("done")
            board.claim()
            os.kill(os.getpid(), signal.SIGKILL)
        return board.outcome()

    same(play(4, act, (0,)), OutcomeUnknownError, (0,))


def test_who_is_slow_is_waited_for():
    def act(board: Board, rank: int) -> Any:
        board.working(True)
        begun = time.monotonic()
        while rank == 1 and time.monotonic() - begun < 2.5 * TIMEOUT:
            time.sleep(TIMEOUT / 20)
            board.advance()
        board.working(False)
        return to_the_end(board, rank)

    assert play(3, act) == [b"\x00\x01\x02"] * 3


def test_who_hangs_in_the_middle_of_writing_fails_the_save():
    def act(board: Board, rank: int) -> Any:
        if rank == 2:
            board.working(True)
            board.advance()
            time.sleep(600)
        return to_the_end(board, rank)

    same(play(3, act, (2,)), RankFailedError, (2,))


def test_who_still_writes_stops_when_another_has_failed():
    def act(board: Board, rank: int) -> Any:
        if rank == 1:
            raise board.fail(from_rank(NoSpaceError("full", path="/x"), 1))
        board.working(True)
        until = time.monotonic() + 30
        while time.monotonic() < until:
            board.advance()
            time.sleep(0.01)
        return None

    same(play(3, act), NoSpaceError, (1,))


def test_of_two_failures_one_is_everybodys():
    def act(board: Board, rank: int) -> Any:
        raise board.fail(from_rank(NoSpaceError(f"full {rank}"), rank))

    errors = play(4, act)
    same(errors, NoSpaceError, errors[0].ranks)


def test_who_comes_too_late_is_told_what_all_were_told():
    def act(board: Board, rank: int) -> Any:
        if rank == 1:
            time.sleep(600)
        return to_the_end(board, rank)

    store = HashStore()
    with Board(PrefixStore("save", store), 0, 2, 0.3) as board:
        with pytest.raises(RankFailedError) as first:
            board.hear_all("done")
        with (
            Board(PrefixStore("save", store), 1, 2, 0.3) as late,
            pytest.raises(RankFailedError) as second,
        ):
            late.outcome()
    assert str(first.value) == str(second.value)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_store_that_dies_with_its_rank_leaves_the_outcome_unknown(number):
    reading, writing = os.pipe()
    with store_server() as (port, server):

        def work() -> Any:
            with Board(connect(port), 1, 2, TIMEOUT) as board:
                board.say("done", b"")
                os.write(writing, b"said")
                try:
                    board.outcome()
                except SpillError as error:
                    return error
            return None

        child = start_child(work)
        os.read(reading, 4)
        os.kill(server.pid, number)
        error = child.result(30)
    os.close(reading)
    os.close(writing)
    assert type(error) is OutcomeUnknownError
    assert "torchrun" in str(error)
