"""Conversions on the CPU: what torch would make of each tensor by itself."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tensorspill.errors import CapacityError, UnsupportedError
from tensorspill.pool import BufferPool
from tensorspill.pool.kernels.casting import cast
from tensorspill.pool.kernels.packing import pack, packed_bytes, unpack, views

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32]
ODD = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e39, 1e-45, 65520.0])


def same(one, other):
    """Whether two tensors have the same bits, or both NaN."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        *(each.nan_to_num().reshape(-1).view(torch.uint8) for each in (one, other))
    )


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_as_torch_does(source, target):
    values = [(torch.randn(n) * 1000).to(source) for n in (0, 1, 7, 1000)]
    if source.is_floating_point and target.is_floating_point:
        values.append(ODD.to(source))
    targets = [torch.full(v.shape, 77, dtype=target) for v in values]
    cast(values, targets)
    for value, found in zip(values, targets, strict=True):
        assert same(found, value.to(target))


def test_any_layout_and_autograd_is_left_out():
    base = torch.randn(6, 8, requires_grad=True)
    sources = [base.t(), base[:, ::2], base.reshape(-1)]
    targets = [torch.zeros(48, dtype=torch.bfloat16), torch.zeros(4, 6).half(), torch.zeros(2, 24)]
    cast(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert not target.requires_grad
        assert torch.equal(target.reshape(-1), source.detach().reshape(-1).to(target.dtype))


def test_a_target_may_be_strided():
    room = torch.zeros(8, 8)
    cast([torch.ones(4, 8)], [room[::2]])
    assert room.sum() == 32


def test_in_place():
    tensor = torch.randn(100)
    before = tensor.clone()
    cast([tensor], [tensor])
    assert torch.equal(tensor, before)


def test_what_does_not_match_writes_nothing():
    target = torch.zeros(4)
    with pytest.raises(UnsupportedError, match="5 elements"):
        cast([torch.ones(4), torch.ones(5)], [target, torch.zeros(4)])
    with pytest.raises(UnsupportedError, match="2 tensors"):
        cast([torch.ones(4), torch.ones(4)], [target])
    assert not target.any()


@given(
    shapes=st.lists(st.lists(st.integers(0, 5), max_size=3), max_size=6),
    dtype=st.sampled_from([None, torch.bfloat16, torch.float16]),
    alignment=st.sampled_from([8, 64, 256, 24]),
)
def test_packing_and_back(shapes, dtype, alignment):
    tensors = [torch.randn(shape).to(DTYPES[i % 3]) for i, shape in enumerate(shapes)]
    needed = packed_bytes(tensors, dtype, alignment=alignment)
    slab = torch.full((needed + 64,), 0xA5, dtype=torch.uint8)
    packed = pack(tensors, slab, dtype, alignment=alignment)
    used = torch.zeros_like(slab, dtype=torch.bool)
    for tensor, view in zip(tensors, packed, strict=True):
        assert view.shape == tensor.shape
        assert same(view.float(), tensor.to(dtype or tensor.dtype).float())
        start = view.data_ptr() - slab.data_ptr() if view.numel() else 0
        assert start % alignment == 0
        assert not used[start : start + view.nbytes].any()
        used[start : start + view.nbytes] = True
    assert bool((slab[~used] == 0xA5).all())
    back = [torch.full_like(tensor, 3) for tensor in tensors]
    unpack(slab, back, dtype, alignment=alignment)
    for tensor, again in zip(tensors, back, strict=True):
        assert same(again, tensor.to(dtype or tensor.dtype).to(tensor.dtype))


def test_a_buffer_is_a_slab():
    with BufferPool("1MiB") as pool:
        tensors = [torch.randn(100), torch.randn(3, 3)]
        buffer = pool.allocate(packed_bytes(tensors))
        pack(tensors, buffer)
        back = [torch.empty(100), torch.empty(3, 3)]
        unpack(buffer, back)
        assert torch.equal(back[0], tensors[0])
        assert torch.equal(back[1], tensors[1])
        buffer.release()


def test_bad_slabs():
    tensors = [torch.randn(100), torch.randn(100)]
    with pytest.raises(CapacityError) as raised:
        pack(tensors, torch.zeros(900, dtype=torch.uint8))
    assert (raised.value.asked, raised.value.free) == (912, 900)
    with pytest.raises(UnsupportedError, match="contiguous"):
        pack(tensors, torch.zeros(64, 64)[:, ::2])
    with pytest.raises(UnsupportedError, match="item size"):
        packed_bytes(tensors, alignment=2)
    odd = torch.zeros(2001, dtype=torch.uint8)[1:]
    with pytest.raises(UnsupportedError, match="address"):
        views(tensors, odd)
