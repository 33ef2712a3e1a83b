"""The digest: equal to its definition, everywhere, and different for different bytes."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import ClosedError, UnsupportedError
from tensorspill.pool import BufferPool, digest
from tensorspill.pool.digest import digest_reference

DTYPES = [torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64, torch.int64]


def fresh(nbytes: int) -> torch.Tensor:
    return torch.randint(256, (nbytes,), dtype=torch.uint8)


def test_known_values() -> None:
    # Fixed for ever: digests may be kept in files.
    known = {
        b"": 0,
        b"\0": 0x2FF145472E2746D6,
        b"tensorspill": 0x39BEC80DC5D4FAF9,
        bytes(range(256)): 0xB4FFACC1AAC27ACD,
    }
    for data, expected in known.items():
        assert digest(data) == digest_reference(data) == expected


@given(lead=st.integers(0, 64), data=st.binary(max_size=700))
def test_equals_the_definition(lead: int, data: bytes) -> None:
    memory = torch.zeros(lead + len(data) + 64, dtype=torch.uint8)
    view = memory[lead : lead + len(data)]
    if data:
        view.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    memory[lead + len(data) :] = 0xFF
    assert digest(view) == digest(data) == digest_reference(data)


@pytest.mark.parametrize("nbytes", [1 << 12, (1 << 16) + 1, (1 << 18) - 3])
def test_large_equals_the_definition(nbytes: int) -> None:
    memory = fresh(nbytes + 8)
    for lead in range(8):
        view = memory[lead : lead + nbytes]
        assert digest(view) == digest_reference(view.numpy().tobytes())


@given(data=st.binary(min_size=1, max_size=300), where=st.integers(0))
def test_every_bit_counts(data: bytes, where: int) -> None:
    where %= 8 * len(data)
    changed = bytearray(data)
    changed[where // 8] ^= 1 << where % 8
    assert digest(changed) != digest(data)


@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=50), data=st.data())
def test_every_position_counts(words: list[int], data: st.DataObject) -> None:
    one, other = data.draw(st.tuples(*[st.integers(0, len(words) - 1)] * 2))
    swapped = words.copy()
    swapped[one], swapped[other] = swapped[other], swapped[one]
    equal = digest(np.array(words, np.uint64)) == digest(np.array(swapped, np.uint64))
    assert equal == (words == swapped)


def test_swapped_blocks_and_missing_zeros_are_found() -> None:
    blocks = fresh(4 * 4096).reshape(4, 4096)
    assert digest(blocks) != digest(blocks[[0, 2, 1, 3]])
    zeros = torch.zeros(4096, dtype=torch.uint8)
    assert len({digest(zeros[:n]) for n in range(100)}) == 100


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_and_shape(dtype: torch.dtype) -> None:
    raw = fresh(4 * 6 * dtype.itemsize) & 1
    tensor = raw.view(dtype).reshape(4, 6)
    assert digest(tensor) == digest(raw)
    assert digest(tensor[1, 2]) == digest(raw.view(dtype)[8:9])
    assert digest(tensor[:0]) == digest(b"")


def test_what_it_takes() -> None:
    raw = fresh(1000)
    expected = digest_reference(raw.numpy().tobytes())
    frozen = raw.numpy().copy()
    frozen.flags.writeable = False
    content = raw.numpy().tobytes()
    for data in (raw, raw.numpy(), frozen, content, bytearray(content), memoryview(content)):
        assert digest(data) == expected
    parameter = torch.nn.Parameter(torch.randn(10, 3))
    assert digest(parameter) == digest(parameter.detach().numpy())
    assert digest(memoryview(b"")) == digest(np.empty((3, 0))) == digest(b"")
    assert digest(np.float64(1.5).reshape(())) == digest(np.array([1.5]))


def test_a_buffer() -> None:
    with BufferPool(8192) as pool:
        buffer = pool.allocate(1001)
        expected = fresh(1001)
        buffer.tensor.copy_(expected)
        assert digest(buffer) == digest(expected)
        buffer.release()
        with pytest.raises(ClosedError):
            digest(buffer)


def test_what_it_refuses() -> None:
    square = torch.zeros(4, 4)
    for data in (square.t()[1:], square.numpy()[:, 1], square[:, ::2], memoryview(b"abcd")[::2]):
        with pytest.raises(UnsupportedError):
            digest(data)
    for no_memory in (3, None, "text", torch.empty(4, device="meta")):
        with pytest.raises(UnsupportedError):
            digest(no_memory)
