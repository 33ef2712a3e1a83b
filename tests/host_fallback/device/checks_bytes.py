"""The right bytes at the right places, in few calls of the driver; sums that add up."""

import os
import random
import sys
import threading

import numpy as np
import pytest

from tensorspill.engine import Request
from tensorspill.errors import UnsupportedError
from tests.host_fallback.device.helpers import SEAMS, Guarded, open_staged, random_array
from tests.standin.arrays import DeviceArray
from tests.standin.control import cuda

MIB = 1 << 20
OPTIONS = {
    "defaults": {},
    "seams": SEAMS,
    "threads": {"staging_block": 16384, "staging_bytes": 65536, "threads": 3, "block_bytes": 8192},
    "page cache": {"staging_block": 16384, "staging_bytes": 65536, "direct": "no"},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_fuzz(tmp_path, options):
    """250 transfers each way, at any offset, size and misalignment, over a known background."""
    seed = random.randrange(1 << 30)
    sys.stdout.write(f"seed {seed}\n")
    chance = random.Random(seed)
    expected = np.frombuffer(os.urandom(300_000), "u1").copy()
    (tmp_path / "x").write_bytes(expected.tobytes())
    limit = 20_000 if options is SEAMS else 200_000
    with open_staged(tmp_path, **options) as engine, engine.open("x", "r+") as file:
        for _ in range(125):
            nbytes = chance.choice([1, 511, 4096, chance.randrange(1, limit)])
            offset = chance.choice([0, 4096, chance.randrange(300_000 - nbytes + 1)])
            offset = min(offset, 300_000 - nbytes)
            array, content = random_array(nbytes + 7)
            shift = chance.randrange(8)
            source = array[shift : shift + nbytes]
            engine.submit([Request(source, file, offset, write=True)]).result()
            expected[offset : offset + nbytes] = content[shift : shift + nbytes]
            target = Guarded(nbytes, chance.randrange(4096))
            engine.submit([Request(target.array, file, offset)]).result()
            assert (target.content() == expected[offset : offset + nbytes]).all()
    assert (tmp_path / "x").read_bytes() == expected.tobytes()


@pytest.mark.parametrize("options", [{}, SEAMS], ids=["defaults", "seams"])
def test_many_requests_and_files_in_a_batch(tmp_path, options):
    chance = random.Random(5)
    sizes = [chance.choice([0, 1, 300, 4096, 5000, 12_288]) for _ in range(60)]
    sources = [random_array(max(n, 1)) for n in sizes]
    with open_staged(tmp_path, **options) as engine:
        files = [engine.open(f"f{i}", "w") for i in range(3)]
        requests, offsets = [], [0, 0, 0]
        for i, (n, (array, _)) in enumerate(zip(sizes, sources, strict=True)):
            requests.append(Request(array, files[i % 3], offsets[i % 3], n, write=True))
            offsets[i % 3] += n + 37 * (i % 2)
        assert engine.submit(requests).result().nbytes == sum(sizes)
        targets = [Guarded(max(n, 1), 11) for n in sizes]
        back = [
            Request(target.array, request.file, request.offset, n)
            for n, target, request in zip(sizes, targets, requests, strict=True)
        ]
        assert engine.submit(back).result().nbytes == sum(sizes)
        for n, target, (_, content) in zip(sizes, targets, sources, strict=True):
            assert (target.content()[:n] == content[:n]).all()
            assert (target.content()[n:] == 0xA5).all()


def test_reads_and_writes_in_one_batch(tmp_path):
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
        first, content = random_array(MIB)
        engine.submit([Request(first, file, write=True)]).result()
        second, other = random_array(5000)
        target = Guarded(MIB)
        engine.submit(
            [Request(target.array, file), Request(second, file, MIB + 3, write=True)]
        ).result()
        assert (target.content() == content).all()
    assert (tmp_path / "x").read_bytes()[MIB + 3 :] == other.tobytes()


def test_what_is_beside_a_write_stays(tmp_path):
    background = os.urandom(50_000)
    (tmp_path / "x").write_bytes(background)
    array, content = random_array(9000)
    with open_staged(tmp_path, **SEAMS) as engine, engine.open("x", "r+") as file:
        engine.submit([Request(array, file, 12_345, write=True)]).result()
    found = (tmp_path / "x").read_bytes()
    assert found == background[:12_345] + content.tobytes() + background[21_345:]


def test_exclusive_files_may_be_padded_but_keep_their_bytes(tmp_path):
    with open_staged(tmp_path, **SEAMS) as engine, engine.open("x", "w", 1 << 16) as file:
        file.exclusive = True
        arrays = [random_array(n) for n in (5000, 100, 8192, 4097)]
        offsets = [0, 8192, 12_288, 20_480]
        engine.submit(
            [Request(a, file, o, write=True) for (a, _), o in zip(arrays, offsets, strict=True)]
        ).result()
    found = (tmp_path / "x").read_bytes()
    for (_, content), offset in zip(arrays, offsets, strict=True):
        assert found[offset : offset + len(content)] == content.tobytes()


def test_small_tensors_share_a_call_of_the_driver(tmp_path):
    whole, content = random_array(8 * MIB)
    parts = [whole[i * 4096 : (i + 1) * 4096] for i in range(2048)]
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
        for write in (True, False):
            cuda().reset_counts()
            requests = [Request(p, file, i * 4096, write=write) for i, p in enumerate(parts)]
            engine.submit(requests).result()
            counts = cuda().counts()
            assert counts["cuMemcpyBatchAsync"] == 2, "two blocks"
            assert "cuMemcpyAsync" not in counts
            assert counts["cuPointerGetAttributes"] == 1, "one allocation"
        assert engine.statistics().by_path["staged-device/direct"].operations <= 16
    assert (tmp_path / "x").read_bytes() == content.tobytes()


def test_sums_add_up(tmp_path):
    sizes = [1, 511, 4096, 5000, 300_000, 5 * MIB]
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
        records = [
            engine.submit([Request(random_array(n)[0], file, i, write=True)]).result()
            for i, n in enumerate(sizes)
        ]
        records += [engine.submit([Request(DeviceArray(n), file, 1)]).result() for n in sizes]
        for record, n in zip(records, sizes + sizes, strict=True):
            assert record.nbytes == n == sum(record.by_path.values())
            assert all(path.startswith("staged-device/") for path in record.by_path)
        statistics = engine.statistics()
    assert statistics.bytes_read == statistics.bytes_written == sum(sizes)
    paths = statistics.by_path
    assert sum(path.nbytes for path in paths.values()) == 2 * sum(sizes)
    copy = paths["staged-device/copy"]
    assert (copy.nbytes, copy.io_bytes) == (0, 2 * sum(sizes))
    assert copy.latencies.count == copy.operations
    assert all(path.why and path.operations and path.seconds > 0 for path in paths.values())
    assert "page-locked" in paths["staged-device/direct"].why
    assert statistics.staging_bytes >= 64 * MIB
    assert statistics.options["staging_block"] == (4 * MIB, "default")
    assert statistics.engine == "aio"
    assert statistics.device == "cuda:0"


def test_one_hundred_and_twenty_eight_batches_at_a_time(tmp_path):
    failures: list[BaseException] = []
    with open_staged(tmp_path, staging_block=8192, staging_bytes=32768) as engine:
        file = engine.open("x", "w", 16 * MIB)

        def work(number: int) -> None:
            try:
                arrays = [random_array(10_000 + i) for i in range(16)]
                places = [(number * 16 + i) * 65536 + 13 * i for i in range(16)]
                for write in (True, False):
                    targets = [Guarded(a.nbytes, 3) for a, _ in arrays]
                    transfers = [
                        engine.submit([Request(a if write else t.array, file, place, write=write)])
                        for (a, _), t, place in zip(arrays, targets, places, strict=True)
                    ]
                    for transfer in transfers:
                        transfer.result(60)
                for (_, content), target in zip(arrays, targets, strict=True):
                    assert (target.content() == content).all()
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_a_file_system_whose_blocks_do_not_fit(tmp_path):
    with open_staged(tmp_path, staging_block=4096 * 3, staging_bytes=4096 * 9) as engine:
        file = engine.open("x", "w")
        assert file.granule == 4096
    with pytest.raises(UnsupportedError, match="staging_block"):
        open_staged(tmp_path, staging_block=5000)
    with pytest.raises(UnsupportedError, match="staging_bytes"):
        open_staged(tmp_path, staging_block=8192, staging_bytes=8192)
