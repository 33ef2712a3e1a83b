"""No wrong byte: whatever the sizes, offsets, addresses, threads and blocks."""

import random
from pathlib import Path

import numpy as np
import pytest

from tensorspill.engine import Engine, Request
from tests.gds.inside.conftest import LANE
from tests.gds.inside.moving import content, fresh, gds, holds, poisoned, read, write

SIZES = (1, 7, 511, 4095, 4096, 4097, 8191, 16_383, 16_384, 65_539, 300_000, (1 << 20) + 17)
OFFSETS = (0, 1, 511, 512, 4095, 4096, 4097, 123_457)
SHIFTS = (0, 1, 511, 512, 4095)

#: (block_bytes, threads, depth, threshold_bytes)
SETTINGS = (
    (4096, 1, 1, 8192),
    (8192, 3, 2, 8192),
    (65_536, 8, 64, 16_384),
    (1 << 20, 2, 8, 16_384),
    (4 << 20, 8, 64, 1 << 20),
)


@pytest.mark.parametrize("setting", SETTINGS)
def test_fuzzed_transfers(tmp_path: Path, setting):
    block, threads, depth, threshold = setting
    choose = random.Random(block)
    options = {"block_bytes": block, "threads": threads, "depth": depth}
    with gds(tmp_path, threshold_bytes=threshold, **options) as engine:
        for number in range(100 if LANE == "cufile" else 30):
            nbytes, offset = choose.choice(SIZES), choose.choice(OFFSETS)
            image = content(offset + nbytes + choose.choice((0, 5000))).copy()
            path = tmp_path / f"x{number}"
            image.tofile(path)
            source, data = fresh(nbytes, choose.choice(SHIFTS))
            with engine.open(path.name, "r+") as file:
                write(engine, file, source, offset)
                image[offset : offset + nbytes] = data
                assert np.array_equal(np.fromfile(path, "u1"), image)
                target = poisoned(nbytes, choose.choice(SHIFTS))
                engine.submit([Request(target, file, offset)]).result()
            assert holds(target, data), (setting, nbytes, offset)
            path.unlink()


def test_batches_of_neighbours(engine: Engine, tmp_path: Path):
    """Requests that share pages of the file, in any order, do not undo one another."""
    choose = random.Random(5)
    for _ in range(10):
        sizes = [choose.choice(SIZES[:-1]) for _ in range(12)]
        offsets = [sum(sizes[:i]) for i in range(len(sizes))]
        parts = [fresh(nbytes, choose.choice(SHIFTS)) for nbytes in sizes]
        with engine.open("x", "w", size=sum(sizes)) as file:
            requests = [
                Request(array, file, at, write=True)
                for (array, _), at in zip(parts, offsets, strict=True)
            ]
            choose.shuffle(requests)
            engine.submit(requests).result()
            image = np.concatenate([data for _, data in parts])
            assert np.array_equal(np.fromfile(tmp_path / "x", "u1"), image)
            targets = [poisoned(nbytes, choose.choice(SHIFTS)) for nbytes in sizes]
            engine.submit(
                [Request(t, file, at) for t, at in zip(targets, offsets, strict=True)]
            ).result()
        assert all(holds(t, data) for t, (_, data) in zip(targets, parts, strict=True))


def test_many_small_tensors_of_one_slab_become_few_operations(engine: Engine):
    slab, data = fresh(400 << 10)
    with engine.open("x", "w", size=len(slab)) as file:
        requests = [
            Request(slab[at : at + 4096], file, at, write=True) for at in range(0, len(slab), 4096)
        ]
        engine.submit(requests).result()
        assert sum(path.operations for path in engine.statistics().by_path.values()) == 1
        assert np.array_equal(read(engine, file, len(slab)), data)


def test_neighbours_in_two_allocations_stay_apart(engine: Engine):
    """Allocations may lie side by side; a range over both is in neither."""
    whole, data = fresh(200_000)
    with engine.open("x", "w", size=400_000) as file:
        write(engine, file, whole)
        targets = [poisoned(20_000) for _ in range(20)]
        targets.sort(key=lambda target: target.address)
        engine.submit([Request(t, file, i * 10_000) for i, t in enumerate(targets[:10])]).result()
    for i, target in enumerate(targets[:10]):
        assert holds(target, data[i * 10_000 : i * 10_000 + 20_000])


def test_many_small_tensors_scattered(engine: Engine):
    parts = [fresh(3000 + i, i) for i in range(120)]
    with engine.open("x", "w", size=120 * 4096) as file:
        engine.submit(
            [Request(array, file, i * 4096, write=True) for i, (array, _) in enumerate(parts)]
        ).result()
        targets = [poisoned(3000 + i) for i in range(120)]
        engine.submit([Request(t, file, i * 4096) for i, t in enumerate(targets)]).result()
    assert all(holds(t, data) for t, (_, data) in zip(targets, parts, strict=True))


def test_128_batches_at_a_time(engine: Engine):
    parts = [fresh(40_000, i) for i in range(128)]
    with engine.open("x", "w", size=128 * 40_960) as file:
        transfers = [
            engine.submit([Request(array, file, i * 40_960, write=True)])
            for i, (array, _) in enumerate(parts)
        ]
        for transfer in transfers:
            assert transfer.result(60).nbytes == 40_000
        targets = [poisoned(40_000) for _ in parts]
        transfers = [engine.submit([Request(t, file, i * 40_960)]) for i, t in enumerate(targets)]
        for transfer in transfers:
            transfer.result(60)
    assert all(holds(t, data) for t, (_, data) in zip(targets, parts, strict=True))
