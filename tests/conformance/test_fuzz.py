"""Any mixture of sizes, offsets, addresses and options moves the right bytes, and only those."""

import os
import random
import threading
from pathlib import Path

import pytest

from tensorspill.engine import Engine, Request
from tests.conformance.data import constant, equal, fill, poisoned, random_host_bytes
from tests.conformance.lanes import Lane
from tests.conformance.memory import MEMORY

SIZES = (1, 511, 4095, 4096, 4097, 16_383, 16_384, 16_385, 65_539, 262_144, 300_001)
OFFSETS = (0, 0, 1, 511, 512, 4096, 4097, 123_457)
ROOM = 500_000

#: Engines, and pairs of a write and a read with each: a thousand transfers.
ENGINES, PAIRS = 20, 25


@pytest.mark.costly
def test_a_thousand_transfers(lane: Lane, tmp_path: Path):
    seed = int.from_bytes(os.urandom(4))
    choose = random.Random(seed)
    for _ in range(ENGINES):
        options = options_of(lane, choose)
        with lane.open(tmp_path, **options) as engine:
            for _ in range(PAIRS):
                check_a_pair(engine, choose, f"seed {seed}, options {options}")


def options_of(lane: Lane, choose: random.Random) -> dict[str, int]:
    """Return sizes of blocks and numbers of threads that any engine has."""
    given = getattr(lane.open, "keywords", {})
    drawn = {
        "block_bytes": choose.choice((4096, 20_480, 65_536, 4 << 20)),
        "threads": choose.choice((1, 2, 8)),
        "depth": choose.choice((1, 4, 64)),
    }
    return {name: value for name, value in drawn.items() if name not in given}


def check_a_pair(engine: Engine, choose: random.Random, what: str) -> None:
    """Write a range of a buffer into a file and read it back; compare all of both with a copy."""
    nbytes, offset, at = choose.choice(SIZES), choose.choice(OFFSETS), choose.choice(OFFSETS)
    expected = random_host_bytes(offset + nbytes + choose.choice(OFFSETS))
    path = Path(engine.folder, "x")
    path.write_bytes(expected.numpy().tobytes())
    content = random_host_bytes(nbytes)
    memory = poisoned(ROOM, choose.choice(OFFSETS))
    with engine.open("x", "r+") as file:
        fill(memory[at : at + nbytes], content)
        engine.submit([Request(memory[at : at + nbytes], file, offset, write=True)]).result()
        expected[offset : offset + nbytes] = content
        assert path.read_bytes() == expected.numpy().tobytes(), what
        image = constant(ROOM, 0x5A)
        fill(memory, image)
        engine.submit([Request(memory[at : at + nbytes], file, offset)]).result()
    image[at : at + nbytes] = content
    assert equal(memory, image), what


def test_128_batches_at_once(lane: Lane, tmp_path: Path):
    nbytes = 20_000
    with lane.open(tmp_path) as engine, engine.open("x", "w", size=128 * 4 * nbytes) as file:
        transfers, failures = [], []
        contents = random_host_bytes(128 * 4 * nbytes)
        source = MEMORY.empty(len(contents))
        fill(source, contents)

        def submit(first: int) -> None:
            try:
                for batch in range(first, 128, 4):
                    ranges = range(batch * 4 * nbytes, (batch + 1) * 4 * nbytes, nbytes)
                    requests = [
                        Request(source[at : at + nbytes], file, at, write=True) for at in ranges
                    ]
                    transfers.append(engine.submit(requests))
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=submit, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert sum(transfer.result(60).nbytes for transfer in transfers) == len(contents)
        back = poisoned(len(contents))
        engine.submit([Request(back, file)]).result(60)
        assert equal(back, contents)
