"""What is asked for one at a time moves in batches, and ends as if it had moved alone."""

import contextlib
import os
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tensorspill.deepspeed.batching import (
    ENOUGH_BYTES,
    ENOUGH_REQUESTS,
    LARGE_BYTES,
    Batching,
    Group,
)
from tensorspill.engine import Batch, Engine, Request, Transfer, resolve
from tensorspill.errors import BusyError, ClosedError, EndOfFileError, UnsupportedError
from tensorspill.host_fallback import AioOptions
from tensorspill.host_fallback.engine import AioEngine
from tensorspill.pool import BufferPool
from tests.deepspeed_interface.helpers import fresh

SIZE = 5000


class GatedEngine(AioEngine):
    """Starts batches when the gate is open."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, torch.device("cpu"), resolve(AioOptions, {}, {}))
        self.is_open = True
        self._held: list[tuple[Batch, Transfer]] = []

    def _start(self, batch: Batch, transfer: Transfer) -> None:
        if self.is_open:
            super()._start(batch, transfer)
        else:
            self._held.append((batch, transfer))

    def open_gate(self) -> None:
        self.is_open = True
        while self._held:
            super()._start(*self._held.pop(0))


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[GatedEngine]:
    with GatedEngine(tmp_path) as engine:
        # The first transfer may have to compile kernels first, which takes a while.
        engine.submit([write_of(engine, "warm")]).result()
        yield engine
        engine.open_gate()


def write_of(engine: Engine, name: str, seed: int = 0, nbytes: int = SIZE) -> Request:
    return Request(fresh(nbytes, seed), engine.open(name, "w", nbytes), write=True)


def content(request: Request) -> bytes:
    return bytes(request.buffer.numpy())


def transfers(engine: Engine) -> int:
    """Return how many there were after the fixture's."""
    return engine.statistics().transfers - 1


def until(holds: object, seconds: float = 30) -> bool:
    """Wait until something holds; a machine may be slow."""
    assert callable(holds)
    end = time.monotonic() + seconds
    while not holds() and time.monotonic() < end:
        time.sleep(0.001)
    return bool(holds())


def test_the_first_starts_at_once_and_the_rest_as_one_batch(
    engine: GatedEngine, tmp_path: Path
) -> None:
    batching = Batching()
    requests = [write_of(engine, f"{i}", i) for i in range(10)]
    engine.is_open = False
    begun = [batching.add(engine, request) for request in requests]
    assert transfers(engine) == 1
    engine.open_gate()
    # Nobody waits, and nobody asks for anything any more.
    assert until(lambda: engine.statistics().in_flight == 0 and transfers(engine) == 2)
    for (group, number), request in zip(begun, requests, strict=True):
        group.result(number)
        assert Path(request.file.path).read_bytes() == content(request)


@pytest.mark.parametrize(
    ("nbytes", "count"), [(ENOUGH_BYTES // 4, 4), (100, ENOUGH_REQUESTS)], ids=["bytes", "number"]
)
def test_enough_is_submitted_whatever_is_under_way(
    engine: GatedEngine, nbytes: int, count: int
) -> None:
    batching = Batching()
    engine.is_open = False
    for i in range(count):
        batching.add(engine, write_of(engine, f"{i}", i, nbytes))
    assert transfers(engine) == 1
    batching.add(engine, write_of(engine, "last", 1, nbytes))
    assert transfers(engine) == 2
    engine.open_gate()
    batching.finish()
    assert engine.statistics().bytes_written == SIZE + (count + 1) * nbytes


def test_a_large_one_does_not_wait_for_others(engine: GatedEngine) -> None:
    batching = Batching()
    engine.is_open = False
    batching.add(engine, write_of(engine, "a"))
    batching.add(engine, write_of(engine, "b", 1, LARGE_BYTES))
    assert transfers(engine) == 2


def test_what_is_collected_can_be_submitted_early(engine: GatedEngine) -> None:
    batching = Batching()
    requests = [write_of(engine, f"{i}", i) for i in range(3)]
    engine.is_open = False
    for request in requests[:2]:
        batching.add(engine, request)
    batching.let_go(requests[2].file)
    assert transfers(engine) == 1
    batching.let_go(requests[1].file)
    assert transfers(engine) == 2
    batching.add(engine, requests[2])
    batching.flush()
    batching.flush()
    assert transfers(engine) == 3


def test_one_that_fails_does_not_keep_the_others_back(engine: GatedEngine, tmp_path: Path) -> None:
    group = Group(engine, lambda _: None)
    for i in range(5):
        (tmp_path / f"{i}").write_bytes(bytes([i + 1]) * (100 if i == 2 else SIZE))
        buffer = torch.zeros(SIZE, dtype=torch.uint8)
        group.add(Request(buffer, engine.open(f"{i}")))
    group.submit()
    for i, request in enumerate(group.requests):
        if i == 2:
            with pytest.raises(EndOfFileError) as caught:
                group.result(i)
            assert caught.value.path == str(tmp_path / "2")
        else:
            group.result(i)
            assert content(request) == bytes([i + 1]) * SIZE
    assert group.is_settled
    assert transfers(engine) == 6


def test_those_that_can_not_be_one_batch_start_one_by_one(
    engine: GatedEngine, tmp_path: Path
) -> None:
    group = Group(engine, lambda _: None)
    file = engine.open("a", "w", SIZE)
    first, second, other = fresh(SIZE, 1), fresh(SIZE, 1), write_of(engine, "b")
    for request in (Request(first, file, write=True), Request(second, file, write=True), other):
        group.add(request)
    group.submit()
    for number in range(3):
        group.result(number)
    assert (tmp_path / "a").read_bytes() == bytes(first.numpy())
    assert (tmp_path / "b").read_bytes() == content(other)


def test_what_can_not_start_is_raised_to_whom_it_concerns(engine: GatedEngine) -> None:
    group = Group(engine, lambda _: None)
    for name in "abc":
        group.add(write_of(engine, name))
    group.requests[1].file.close()
    group.requests[2].offset = -1
    group.submit()
    group.result(0)
    with pytest.raises(ClosedError):
        group.result(1)
    with pytest.raises(UnsupportedError):
        group.result(2)
    assert group.is_settled


def test_finishing_moves_what_a_failed_batch_left_undone(
    engine: GatedEngine, tmp_path: Path
) -> None:
    batching = Batching()
    engine.is_open = False
    batching.add(engine, write_of(engine, "first"))
    (tmp_path / "short").write_bytes(b"x")
    batching.add(engine, Request(torch.zeros(SIZE), engine.open("short")))
    last = write_of(engine, "last")
    batching.add(engine, last)
    engine.open_gate()
    batching.finish()
    assert (tmp_path / "last").read_bytes() == content(last)


def test_a_file_is_closed_when_nothing_needs_it_any_more(
    engine: GatedEngine, tmp_path: Path
) -> None:
    """What a failed batch left undone is done before."""
    batching = Batching()
    engine.is_open = False
    batching.add(engine, write_of(engine, "first"))
    (tmp_path / "short").write_bytes(b"x")
    failing = batching.add(engine, Request(torch.zeros(SIZE), engine.open("short")))
    last = write_of(engine, "last")
    group, number = batching.add(engine, last)
    engine.open_gate()
    batching.let_go(last.file)
    last.file.close()
    group.result(number)
    assert (tmp_path / "last").read_bytes() == content(last)
    with pytest.raises(EndOfFileError):
        failing[0].result(failing[1])


def test_memory_that_waits_can_not_be_freed(engine: GatedEngine) -> None:
    batching = Batching()
    with BufferPool("1MiB") as pool:
        buffer = pool.allocate((SIZE,), torch.uint8)
        file = engine.open("b", "w", SIZE)
        engine.is_open = False
        batching.add(engine, write_of(engine, "a"))
        batching.add(engine, Request(buffer.tensor, file, write=True))
        with pytest.raises(BusyError):
            buffer.release()
        engine.open_gate()
        batching.finish()
        buffer.release()


def test_memory_is_let_go_when_it_was_moved(engine: GatedEngine) -> None:
    batching = Batching()
    for name in "ab":
        request = write_of(engine, name)
        group, number = batching.add(engine, request)
        batching.flush()
        group.result(number)
        seen = weakref.ref(request.buffer)
        del request, group
        assert until(lambda seen=seen: seen() is None)


def test_an_engine_that_is_closed(tmp_path: Path) -> None:
    engine = GatedEngine(tmp_path)
    request = write_of(engine, "a")
    engine.close()
    group, number = Batching().add(engine, request)
    with pytest.raises(ClosedError):
        group.result(number)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(tmp_path / "a")
