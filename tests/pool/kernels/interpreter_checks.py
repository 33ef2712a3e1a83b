"""The Triton kernels on host memory, in Triton's interpreter; run by test_triton.py in a child.

The interpreter is chosen by environment when kernels are defined, for the whole process.
"""

import os

import numpy as np
import pytest
import torch

from tensorspill.pool.digest import digest_reference
from tensorspill.pool.kernels import casting, triton_launch
from tensorspill.pool.kernels.digesting import begin_digests
from tensorspill.pool.kernels.packing import pack, packed_bytes, unpack
from tests.thorough import THOROUGH

LOWER = [0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
if THOROUGH not in os.environ:
    LOWER = [0x1000, 0x7FFF, 0x8000, 0x8001]


@pytest.fixture(autouse=True)
def only_triton(monkeypatch):
    """Let torch do nothing that the kernels should do."""

    def fail(*_):
        raise AssertionError("torch was used in place of the kernel")

    assert triton_launch.interpreted()
    monkeypatch.setattr(casting, "_copy", fail)
    monkeypatch.setattr(triton_launch, "attempt", lambda launch, instead: launch())


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of so few bytes that small tensors have many."""
    monkeypatch.setattr(triton_launch, "_LANES", 16)
    monkeypatch.setattr(triton_launch, "_STEPS", 2)


def floats(lower):
    """Every upper half of a float32, with a lower half."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    return torch.from_numpy((upper | np.uint32(lower)).view(np.float32))


def check_converted(source, target):
    expected = source.to(target.dtype)
    lost = expected.isnan()
    assert torch.equal(target.isnan(), lost)
    bits = torch.int32 if target.dtype == torch.float32 else torch.int16
    assert torch.equal(target.view(bits)[~lost], expected.view(bits)[~lost])


# The interpreter rounds to float16 by numpy, which warns of what becomes infinite.
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_rounding(dtype):
    sources = [floats(lower) for lower in LOWER]
    targets = [torch.full_like(source, -7, dtype=dtype) for source in sources]
    casting.cast(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        check_converted(source, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_value_back(dtype):
    source = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    target = torch.full((1 << 16,), -7.0)
    casting.cast([source], [target])
    check_converted(source, target)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sizes_and_addresses(dtype, small_blocks):
    memory = torch.randn(4000)
    sources, targets, places = [], [], []
    room = torch.full((8000,), -7, dtype=dtype)
    at = 0
    for lead in range(4):
        for numel in (0, 1, 15, 16, 31, 32, 33, 64, 100):
            sources.append(memory[lead : lead + numel])
            at += 1 + lead
            targets.append(room[at : at + numel])
            places.append((at, numel))
            at += numel
    casting.cast(sources, targets)
    expected = torch.full_like(room, -7)
    for (start, numel), source in zip(places, sources, strict=True):
        expected[start : start + numel] = source
    # What is between the targets is untouched.
    assert torch.equal(room, expected)


def test_pack_and_unpack(small_blocks):
    tensors = [torch.randn(3, 5), torch.randn(()), torch.randn(0, 4), torch.randn(129)]
    slab = torch.zeros(packed_bytes(tensors, torch.bfloat16), dtype=torch.uint8)
    packed = pack(tensors, slab, torch.bfloat16)
    back = [torch.full_like(tensor, -7) for tensor in tensors]
    unpack(slab, back, torch.bfloat16)
    for tensor, half, again in zip(tensors, packed, back, strict=True):
        assert torch.equal(half, tensor.bfloat16())
        assert torch.equal(again, tensor.bfloat16().float())


def test_digests_at_any_size_and_address(small_blocks):
    memory = torch.randint(256, (3000,), dtype=torch.uint8)
    views = [
        memory[lead : lead + nbytes]
        for lead in range(17)
        for nbytes in (0, 1, 7, 8, 9, 255, 256, 257, 512, 769, 2000)
    ]
    found = begin_digests(views).values()
    assert found == [digest_reference(view.numpy().tobytes()) for view in views]


def test_digests_of_whole_blocks():
    memory = torch.randint(256, ((1 << 17) + 16,), dtype=torch.uint8)
    views = [memory[lead : lead + (1 << 17) - cut] for lead in (0, 8, 16, 3) for cut in (0, 5)]
    found = begin_digests(views).values()
    assert found == [digest_reference(view.numpy().tobytes()) for view in views]


def test_digests_of_other_dtypes():
    tensors = [torch.randn(7), torch.randn(5).bfloat16(), torch.ones(3, dtype=torch.bool)]
    found = begin_digests(tensors).values()
    raw = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    assert found == [digest_reference(data) for data in raw]
