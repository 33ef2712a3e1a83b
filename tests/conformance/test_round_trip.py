"""What goes in comes out: any size, address and offset, alone and in batches."""

import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.engine import Engine, Request
from tests.conformance.data import (
    bytes_of,
    equal,
    fill,
    guards_intact,
    host,
    is_poison,
    joined,
    poisoned,
    random_bytes,
    random_host_bytes,
    read,
    write,
)
from tests.conformance.lanes import for_host_memory, for_tensors
from tests.conformance.memory import MEMORY

names = (f"file{i}" for i in itertools.count())

#: Values around the seams: sectors, pages and the blocks of the lanes.
seams = st.builds(
    lambda base, delta: max(0, base + delta),
    st.sampled_from([0, 512, 4096, 8192, 3 * 4096, 65536, 131072]),
    st.integers(-3, 3),
)
shifts = st.one_of(st.sampled_from([0, 64, 512]), st.integers(0, 4095))
sizes = st.one_of(seams, st.integers(0, 40_000))


@dataclass(frozen=True)
class Piece:
    """A request to be: how much, at which address, how far behind the piece before it."""

    nbytes: int
    source_shift: int
    target_shift: int
    gap: int


pieces = st.builds(Piece, sizes, shifts, shifts, st.one_of(st.just(0), seams))


@given(nbytes=sizes, offset=seams, source=shifts, target=shifts)
def test_one_request(shared_engine: Engine, nbytes, offset, source, target):
    name = next(names)
    content = random_bytes(nbytes, source)
    with shared_engine.open(name, "w") as file:
        write(shared_engine, file, content, offset)
        destination = poisoned(nbytes, target)
        shared_engine.submit([Request(destination, file, offset)]).result()
        assert file.size == (offset + nbytes if nbytes else 0)
    assert equal(destination, content)
    assert guards_intact(destination)
    shared_engine.remove(name)


@given(batch=st.lists(pieces, min_size=1, max_size=12), order=st.randoms(use_true_random=False))
@pytest.mark.parametrize("exclusive", [False, True])
def test_a_batch_of_mixed_sizes(shared_engine: Engine, exclusive, batch, order):
    name = next(names)
    contents = [random_bytes(piece.nbytes, piece.source_shift) for piece in batch]
    offsets, image = _lay_out(batch, contents, exclusive)
    with shared_engine.open(name, "w", size=len(image)) as file:
        file.exclusive = exclusive
        requests = [
            Request(content, file, offset, write=True)
            for content, offset in zip(contents, offsets, strict=True)
        ]
        order.shuffle(requests)
        shared_engine.submit(requests).result()
        destinations = [poisoned(piece.nbytes, piece.target_shift) for piece in batch]
        requests = [
            Request(destination, file, offset)
            for destination, offset in zip(destinations, offsets, strict=True)
        ]
        order.shuffle(requests)
        shared_engine.submit(requests).result()
    for destination, content in zip(destinations, contents, strict=True):
        assert equal(destination, content)
        assert guards_intact(destination)
    # Nothing but the requests' bytes changed: what lies between them is zero as before.
    assert Path(shared_engine.folder, name).read_bytes() == image
    shared_engine.remove(name)


def _lay_out(batch, contents, exclusive) -> tuple[list[int], bytes]:
    """Place pieces one behind another; return offsets and what the file must hold."""
    offsets, end = [], 0
    for piece in batch:
        start = end + piece.gap
        if exclusive:
            start = -(-start // 4096) * 4096
        offsets.append(start)
        end = start + piece.nbytes
    image = bytearray(-(-end // 4096) * 4096 if exclusive else end)
    for offset, content in zip(offsets, contents, strict=True):
        image[offset : offset + len(content)] = bytes_of(content)
    return offsets, bytes(image)


@given(
    pages=st.lists(st.integers(1, 180), min_size=2, max_size=10),
    shift=st.sampled_from([0, 0, 512, 64]),
)
def test_aligned_neighbours(shared_engine: Engine, pages, shift):
    """Tensors of whole pages, one behind another in the file but not in memory."""
    name = next(names)
    contents = [random_bytes(count * 4096, shift) for count in pages]
    offsets = [sum(pages[:i]) * 4096 for i in range(len(pages))]
    with shared_engine.open(name, "w", size=sum(pages) * 4096) as file:
        shared_engine.submit(
            [Request(c, file, at, write=True) for c, at in zip(contents, offsets, strict=True)]
        ).result()
        destinations = [poisoned(len(content), shift) for content in contents]
        record = shared_engine.submit(
            [Request(d, file, at) for d, at in zip(destinations, offsets, strict=True)]
        ).result()
    assert record.nbytes == sum(pages) * 4096
    assert all(map(equal, destinations, contents))
    assert all(map(guards_intact, destinations))
    assert Path(shared_engine.folder, name).read_bytes() == bytes_of(joined(contents))
    shared_engine.remove(name)


@given(nbytes=st.integers(1, 20_000), offset=st.integers(0, 20_000), shift=shifts)
def test_neighbours_in_a_block_survive_a_write(shared_engine: Engine, nbytes, offset, shift):
    name = next(names)
    before = random_bytes(45_000)
    content = random_bytes(nbytes, shift)
    with shared_engine.open(name, "w", size=45_000) as file:
        write(shared_engine, file, before)
        write(shared_engine, file, content, offset)
        after = read(shared_engine, file, 45_000)
    expected = host(before).clone()
    expected[offset : offset + nbytes] = host(content)
    assert equal(after, expected)
    shared_engine.remove(name)


@for_tensors
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.complex64,
        torch.bool,
        torch.int16,
        torch.float64,
    ],
)
def test_every_dtype_of_torch(engine: Engine, dtype):
    content = random_bytes(9 * 16).view(torch.uint8)
    if dtype is torch.bool:
        content = content & 1
    content = content.view(dtype).reshape(9, -1)
    destination = torch.zeros_like(content)
    with engine.open("x", "w") as file:
        write(engine, file, content)
        engine.submit([Request(destination, file)]).result()
    assert equal(destination.view(torch.uint8), content.view(torch.uint8))


@for_host_memory
def test_arrays_and_the_buffer_protocol(engine: Engine):
    array = np.arange(1000, dtype="f4")
    with engine.open("x", "w") as file:
        engine.submit(
            [
                Request(array, file, 0, write=True),
                Request(b"read-only bytes are a fine source", file, 4000, 9, write=True),
                Request(b"", file, 5000, write=True),
            ]
        ).result()
        target, text = np.zeros_like(array), bytearray(9)
        engine.submit([Request(target, file), Request(text, file, 4000)]).result()
    assert np.array_equal(target, array)
    assert text == b"read-only"


@for_tensors
def test_a_pool_buffer(engine: Engine):
    from tensorspill.pool import BufferPool

    with BufferPool(1 << 20, MEMORY.device) as pool, engine.open("x", "w") as file:
        buffer = pool.allocate((100, 7), torch.bfloat16)
        buffer.tensor.copy_(torch.randn(100, 7))
        expected = buffer.tensor.clone()
        engine.submit([Request(buffer, file, write=True)]).result()
        buffer.tensor.fill_(float("nan"))
        engine.submit([Request(buffer, file)]).result()
        assert torch.equal(buffer.tensor, expected)
        buffer.release()


def test_part_of_a_buffer(engine: Engine):
    content, destination = random_bytes(5000), poisoned(5000)
    with engine.open("x", "w") as file:
        write(engine, file, content)
        engine.submit([Request(destination, file, 1000, nbytes=3000)]).result()
    assert equal(destination[:3000], content[1000:4000])
    assert is_poison(destination[3000:])


def test_a_prepared_batch_again_and_again(engine: Engine):
    source, destination = random_bytes(300_000, 64), poisoned(300_000, 1)
    with engine.open("x", "w") as file:
        out = engine.prepare([Request(source, file, write=True)])
        back = engine.prepare([Request(destination, file)])
        for _ in range(3):
            fill(source, random_host_bytes(300_000))
            engine.submit(out).result()
            engine.submit(back).result()
            assert equal(source, destination)


def test_many_batches_at_once(engine: Engine):
    count, nbytes = 300, 10_000
    contents = [random_bytes(nbytes) for _ in range(count)]
    with engine.open("x", "w", size=count * nbytes) as file:
        transfers = [
            engine.submit([Request(content, file, i * nbytes, write=True)])
            for i, content in enumerate(contents)
        ]
        assert sum(transfer.result().nbytes for transfer in transfers) == count * nbytes
        destinations = [poisoned(nbytes) for _ in range(count)]
        for transfer in [
            engine.submit([Request(destination, file, i * nbytes)])
            for i, destination in enumerate(destinations)
        ]:
            transfer.result()
    assert all(map(equal, contents, destinations))


def test_several_files_in_a_batch(engine: Engine):
    contents = [random_bytes(50_000 + i, i) for i in range(4)]
    files = [engine.open(f"x{i}", "w") for i in range(4)]
    engine.submit(
        [Request(c, f, write=True) for c, f in zip(contents, files, strict=True)]
    ).result()
    for content, file in zip(contents, files, strict=True):
        assert equal(read(engine, file, len(content)), content)
