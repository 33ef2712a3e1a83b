"""Requests that can't be carried out are refused at once, and nothing of their batch is done."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tensorspill.engine import Engine, Request
from tensorspill.errors import ClosedError, UnsupportedError
from tests.conformance.data import equal, is_poison, poisoned, random_bytes, read, write
from tests.conformance.lanes import for_host_memory, for_tensors
from tests.conformance.memory import MEMORY


@pytest.fixture
def file(engine: Engine):
    with engine.open("x", "w", size=10_000) as opened:
        write(engine, opened, random_bytes(10_000))
        yield opened


def refused(engine: Engine, requests, match: str) -> UnsupportedError:
    before = engine.statistics().transfers
    with pytest.raises(UnsupportedError, match=match) as caught:
        engine.submit(requests)
    assert engine.statistics().transfers == before
    return caught.value


@for_tensors
def test_a_non_contiguous_tensor(engine: Engine, file):
    tensor = torch.zeros(10, 10, device=MEMORY.device).t()
    error = refused(engine, [Request(tensor, file, 7)], "not contiguous")
    assert (error.path, error.offset) == (file.path, 7)
    tensor = torch.zeros(1, device=MEMORY.device).expand(100)
    refused(engine, [Request(tensor, file)], "not contiguous")


def test_a_non_contiguous_array(engine: Engine, file):
    error = refused(engine, [Request(poisoned(100)[::2], file, 7)], "not contiguous")
    assert (error.path, error.offset) == (file.path, 7)


@for_host_memory
def test_a_column_of_an_array(engine: Engine, file):
    refused(engine, [Request(np.zeros((10, 10))[:, 1], file)], "not contiguous")


@for_tensors
def test_a_tensor_whose_bytes_are_not_its_values(engine: Engine, file):
    for tensor in (
        torch.zeros(4, dtype=torch.complex64, device=MEMORY.device).conj(),
        torch.zeros(4, dtype=torch.complex64, device=MEMORY.device).conj().imag,
        torch.zeros(3, 3, device=MEMORY.device).to_sparse(),
    ):
        refused(engine, [Request(tensor, file, write=True)], "not contiguous")


@for_host_memory
def test_a_read_only_destination(engine: Engine, file):
    array = np.zeros(10, "u1")
    array.setflags(write=False)
    for buffer in (b"0123456789", array, memoryview(b"0123456789")):
        refused(engine, [Request(buffer, file)], "read-only")


def test_something_without_memory(engine: Engine, file):
    for buffer in ("text", 5, None, [1, 2]):
        refused(engine, [Request(buffer, file)], "no usable")


def test_another_device(engine: Engine, file):
    refused(engine, [Request(torch.empty(10, device="meta"), file)], "meta")


def test_a_range_beyond_the_buffer(engine: Engine, file):
    refused(engine, [Request(poisoned(10), file, nbytes=11)], "10 bytes")
    refused(engine, [Request(poisoned(10), file, nbytes=-1)], "negative")
    refused(engine, [Request(poisoned(10), file, offset=-1)], "negative")


def test_overlapping_destinations(engine: Engine, file):
    memory = poisoned(100)
    error = refused(
        engine, [Request(memory[:60], file), Request(memory[59:], file, 1000)], "overlap"
    )
    assert (error.path, error.offset, error.nbytes) == (file.path, 1000, 41)
    assert is_poison(memory), "nothing of the batch may have been done"


def test_a_source_that_is_read_into(engine: Engine, file):
    memory = random_bytes(100)
    refused(
        engine, [Request(memory, file, write=True), Request(memory[50:], file, 1000)], "overlap"
    )


def test_overlapping_ranges_of_a_file(engine: Engine, file):
    a, b = random_bytes(100), random_bytes(100)
    refused(engine, [Request(a, file, write=True), Request(b, file, 99, write=True)], "overlap")
    refused(engine, [Request(a, file, write=True), Request(b, file, 99)], "overlap")
    # A short range inside a long one, with another in between.
    long = random_bytes(1000)
    refused(
        engine,
        [Request(long, file), Request(a, file, 5000), Request(b[:1], file, 999, write=True)],
        "overlap",
    )


def test_what_may_overlap(engine: Engine, file):
    source, twice = random_bytes(100), [poisoned(100), poisoned(100)]
    engine.submit(
        [Request(source, file, 0, write=True), Request(source[50:], file, 200, write=True)]
    ).result()
    engine.submit([Request(target, file) for target in twice]).result()
    assert equal(twice[0], source)
    assert equal(twice[1], source)
    # Ranges that touch do not overlap, and empty ones lie nowhere.
    engine.submit(
        [
            Request(source[:50], file, 0, write=True),
            Request(source[50:], file, 50, write=True),
            Request(source[:0], file, 25, write=True),
        ]
    ).result()
    assert equal(read(engine, file, 100), source)


def test_zero_bytes(engine: Engine, file, tmp_path: Path):
    for requests in (
        [],
        [Request(poisoned(0), file, 10**6)],
        [Request(poisoned(0), file, write=True)],
    ):
        record = engine.submit(requests).result()
        assert record.nbytes == 0
        assert not record.by_path
    assert (tmp_path / "x").stat().st_size == 10_000


def test_a_released_buffer(engine: Engine, file):
    from tensorspill.pool import BufferPool

    with BufferPool(1 << 16, MEMORY.device) as pool:
        buffer = pool.allocate(100)
        buffer.release()
        with pytest.raises(ClosedError):
            engine.submit([Request(buffer, file)])
