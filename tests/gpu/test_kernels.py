"""The kernels, compiled for the GPU that is here: digests and conversions, by Triton and torch."""

import numpy as np
import pytest
import torch

from tensorspill.pool.digest import digest, digest_reference
from tensorspill.pool.kernels import torch_digest, triton_launch
from tensorspill.pool.kernels.casting import cast
from tensorspill.pool.kernels.digesting import begin_digests
from tensorspill.pool.kernels.packing import pack, packed_bytes, unpack

pytestmark = pytest.mark.gpu

SIZES = (0, 1, 7, 8, 9, 4095, 65_535, 65_536, 65_537, 200_003)
HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=["triton", "torch"])
def way(request, monkeypatch):
    """Let Triton do the work, or let it be missing."""
    if request.param == "torch":
        monkeypatch.setattr(triton_launch, "_failed", ["left out by a test"])
    elif why := triton_launch.why_not():
        pytest.skip(why)
    return request.param


@pytest.fixture(autouse=True)
def triton_did_not_fail():
    before = list(triton_launch._failed)
    yield
    assert triton_launch._failed in (before, ["left out by a test"])


def reference(tensor):
    raw = tensor.detach().cpu().reshape(-1).view(torch.uint8)
    return digest_reference(raw.numpy().tobytes())


def test_digests_at_any_size_and_address(way):
    memory = torch.randint(256, (300_000,), dtype=torch.uint8, device="cuda")
    views = [memory[lead : lead + nbytes] for lead in range(17) for nbytes in SIZES]
    assert begin_digests(views).values() == [reference(view) for view in views]


def test_what_the_one_function_takes(way):
    tensor = torch.randn(1000, 3, device="cuda", requires_grad=True)
    assert digest(tensor) == digest(tensor.detach().cpu())
    assert digest(tensor.bfloat16()) == digest(tensor.detach().bfloat16().cpu())
    assert digest(tensor[:0]) == digest(b"")


def test_digests_of_cupy_arrays(way):
    cupy = pytest.importorskip("cupy")
    content = np.random.default_rng().integers(0, 256, 70_001, np.uint8)
    assert digest(cupy.asarray(content)) == digest(content)


def test_a_digest_comes_after_the_current_stream(way):
    stream = torch.cuda.Stream()
    memory = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(50):
            memory.add_(1)
        found = digest(memory)
    assert found == reference(torch.full_like(memory, 50))


@pytest.mark.parametrize("dtype", HALVES)
def test_every_rounding(way, dtype):
    upper = torch.arange(1 << 16, device="cuda", dtype=torch.int32) << 16
    lower = (0, 1, 0xFFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF)
    sources = [(upper | low).view(torch.float32) for low in lower]
    targets = [torch.full_like(source, -7, dtype=dtype) for source in sources]
    cast(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        expected = source.to(dtype)
        kept = ~expected.isnan()
        assert torch.equal(target.isnan(), ~kept)
        assert torch.equal(target.view(torch.int16)[kept], expected.view(torch.int16)[kept])


@pytest.mark.parametrize("dtype", HALVES)
def test_every_value_back(way, dtype):
    source = torch.arange(1 << 16, device="cuda", dtype=torch.int32).to(torch.int16).view(dtype)
    target = torch.full((1 << 16,), -7.0, device="cuda")
    cast([source], [target])
    expected = source.float()
    kept = ~expected.isnan()
    assert torch.equal(target.isnan(), ~kept)
    assert torch.equal(target[kept], expected[kept])


def test_casts_between_devices_and_of_other_dtypes(way):
    sources = [torch.randn(999), torch.randn(5, 7, device="cuda").t(), torch.arange(10)]
    targets = [
        torch.zeros(999, dtype=torch.bfloat16, device="cuda"),
        torch.zeros(35, dtype=torch.float16),
        torch.zeros(10, device="cuda"),
    ]
    cast(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target.cpu().reshape(-1), source.cpu().reshape(-1).to(target.dtype))


@pytest.mark.parametrize("dtype", [None, *HALVES])
def test_packing_and_back(way, dtype):
    shapes = [(3, 5), (), (0, 4), (70_001,), (129,), (8, 8192)]
    tensors = [torch.randn(shape, device="cuda") for shape in shapes]
    needed = packed_bytes(tensors, dtype)
    slab = torch.full((needed + 64,), 0xA5, dtype=torch.uint8, device="cuda")
    packed = pack(tensors, slab, dtype)
    assert bool((slab[needed:] == 0xA5).all())
    back = [torch.full_like(tensor, 3) for tensor in tensors]
    unpack(slab, back, dtype)
    for tensor, view, again in zip(tensors, packed, back, strict=True):
        assert torch.equal(view, tensor.to(view.dtype))
        assert torch.equal(again, view.float())


def test_the_fallback_alone():
    memory = torch.randint(256, (9_000_001,), dtype=torch.uint8, device="cuda")
    sums = torch.zeros(1, dtype=torch.int64, device="cuda")
    torch_digest.sum_words([memory], sums)
    other = torch.zeros_like(sums)
    if why := triton_launch.why_not():
        pytest.skip(why)
    triton_launch.launch_sums([memory], other)
    assert torch.equal(sums, other)
