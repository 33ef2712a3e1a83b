"""The parameter swapper: what a parameter is before, during and after each move."""

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tensorspill.errors import (
    BrokenError,
    BusyError,
    CapacityError,
    ClosedError,
    CorruptError,
    EndOfFileError,
    MissingNameError,
    NoSpaceError,
    UnsupportedError,
)
from tensorspill.pool import BufferPool
from tensorspill.swap.swapper import ParameterSwapper, SwapStatus
from tests.conformance.data import guards_intact, poisoned
from tests.faults.limits import file_size_limit
from tests.pool.helpers import RandomAllocator
from tests.spill.helpers import compile_kernels, storm
from tests.swap.helpers import check_swapper, is_placeholder

AVAILABLE, NOT_AVAILABLE, INFLIGHT = (
    SwapStatus.AVAILABLE,
    SwapStatus.NOT_AVAILABLE,
    SwapStatus.INFLIGHT,
)
UNIT = 4096
MIB = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def compiled() -> None:
    compile_kernels()


@pytest.fixture
def swapper(tmp_path: Path) -> Iterator[ParameterSwapper]:
    with ParameterSwapper(tmp_path, torch.float32, "4MiB") as swapper:
        yield swapper
        check_swapper(swapper)


def parameters(count: int, numel: int = 10_000) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(numel + i)) for i in range(count)]


def values(params: list[Any]) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in params]


def same(params: list[Any], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(p.data, e) for p, e in zip(params, expected, strict=True))


class Shard:
    """An object that stands for a parameter."""

    def __init__(self, number: int, tensor: torch.Tensor, callable_numel: bool = False) -> None:
        self.id = number
        self.tensor = tensor
        count = tensor.numel()
        self.numel = (lambda: count) if callable_numel else count


# -- out and in ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64, torch.bool],
)
def test_round_trip(tmp_path: Path, dtype: torch.dtype, verify: bool) -> None:
    shapes = [(1000,), (30, 40), (2, 3, 5), (), (1,), (0,), (4, 0)]
    tensors = [torch.randint(0, 2, shape).to(dtype) for shape in shapes]
    with ParameterSwapper(tmp_path, dtype, "1MiB", verify=verify) as swapper:
        expected = [tensor.clone() for tensor in tensors]
        swapper.swap_out(tensors)
        assert [swapper.status(t) for t in tensors] == [NOT_AVAILABLE] * len(tensors)
        assert [t.shape for t in tensors] == [e.shape for e in expected]
        check_swapper(swapper)
        swapper.swap_in(tensors, wait=True)
        assert swapper.ready(tensors)
        for tensor, value in zip(tensors, expected, strict=True):
            assert tensor.dtype == dtype
            assert tensor.shape == value.shape
            assert torch.equal(tensor.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8))
        check_swapper(swapper)


def test_parameters_keep_their_identity_and_autograd(swapper: ParameterSwapper) -> None:
    layer = nn.Linear(50, 40)
    x, before = torch.randn(3, 50), [p.detach().clone() for p in layer.parameters()]
    expected = layer(x)
    params = list(layer.parameters())
    swapper.swap_out(params)
    assert list(layer.parameters()) == params
    assert layer.weight.isnan().all()
    assert layer(x).isnan().all(), "misuse is visible"
    swapper.swap_in(params).result()
    assert torch.equal(layer(x), expected)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    assert same(params, before)


def test_objects_with_id_numel_and_tensor(swapper: ParameterSwapper) -> None:
    shards = [Shard(i, torch.randn(5000), bool(i % 2)) for i in range(4)]
    expected = [shard.tensor.clone() for shard in shards]
    swapper.swap_out(shards)
    assert all(shard.tensor.isnan().all() for shard in shards)
    again = Shard(2, torch.empty(5000))
    assert swapper.status(again) is NOT_AVAILABLE, "the id is what counts"
    swapper.swap_in(shards, wait=True)
    assert all(map(torch.equal, (shard.tensor for shard in shards), expected))
    with pytest.raises(UnsupportedError, match="no id"):
        swapper.swap_out([object()])  # type: ignore[list-item]


def test_each_parameters_own_dtype(tmp_path: Path) -> None:
    params = [torch.randn(100), torch.randn(100).bfloat16(), torch.arange(100)]
    expected = [p.clone() for p in params]
    with ParameterSwapper(tmp_path, None, "1MiB") as swapper:
        swapper.swap_out(params)
        swapper.swap_in(params, wait=True)
        assert same(params, expected)
        check_swapper(swapper)


def test_statuses_in_flight(swapper: ParameterSwapper) -> None:
    params = parameters(20)
    expected = values(params)
    assert swapper.status(params[0]) is AVAILABLE
    transfer = swapper.swap_out(params, wait=False)
    assert all(p.isnan().all() for p in params), "released from the call on"
    assert {swapper.status(p) for p in params} <= {INFLIGHT, NOT_AVAILABLE}
    check_swapper(swapper)
    transfer.result()
    assert {swapper.status(p) for p in params} == {NOT_AVAILABLE}
    transfer = swapper.swap_in(params)
    assert {swapper.status(p) for p in params} <= {INFLIGHT, AVAILABLE}
    transfer.result()
    assert {swapper.status(p) for p in params} == {AVAILABLE}
    transfer = swapper.swap_out(params, wait=False, release=False)
    assert same(params, expected), "may be read meanwhile"
    transfer.result()
    assert swapper.ready(params)
    assert same(params, expected)


def test_buffers_are_cut_to_size(tmp_path: Path) -> None:
    sizes = [1, 1000, 1024, 5000, 100_000, 3]
    budget = sum(-(-size * 4 // UNIT) * UNIT for size in sizes)
    params = [torch.randn(size) for size in sizes]
    expected = values(params)
    with ParameterSwapper(tmp_path, torch.float32, budget) as swapper:
        swapper.swap_out(params)
        assert swapper.available_bytes == swapper.budget == budget
        for order in itertools.permutations(range(6), 6):
            if order[0] != order[5] - 1:
                continue
            swapper.swap_in([params[i] for i in order], wait=True)
            assert swapper.available_bytes == 0
            assert same(params, expected)
            swapper.release(params)
            check_swapper(swapper)


def test_one_parameter_counts_as_a_batch(swapper: ParameterSwapper) -> None:
    parameter, shard = torch.randn(30, 40), Shard(1, torch.randn(10))
    swapper.swap_out(parameter)
    swapper.swap_out(shard)  # type: ignore[arg-type]
    assert swapper.status(parameter) is NOT_AVAILABLE
    assert swapper.status(shard) is NOT_AVAILABLE


def test_inference_mode_leaves_ordinary_tensors(swapper: ParameterSwapper) -> None:
    layer = nn.Linear(30, 30)
    with torch.inference_mode():
        swapper.swap_out(layer.parameters())
        swapper.swap_in(layer.parameters(), wait=True)
    layer(torch.randn(2, 30)).sum().backward()
    assert layer.weight.grad is not None


# -- a batch is atomic ---------------------------------------------------------------------------


def test_no_memory_changes_nothing(swapper: ParameterSwapper) -> None:
    params = parameters(12, 100_000)
    expected = values(params)
    swapper.swap_out(params)
    swapper.swap_in(params[:3], wait=True)
    before = swapper.statistics()
    with pytest.raises(CapacityError) as caught:
        swapper.swap_in(params[3:])
    error = caught.value
    assert error.asked == sum(p.nbytes for p in params[3:])
    assert error.free == swapper.available_bytes
    assert error.largest is not None
    assert error.largest <= error.free
    after = swapper.statistics()
    assert (after.available, after.not_available) == (3, 9)
    assert after.failures == before.failures
    assert not swapper.has_room(params[3:])
    assert swapper.has_room(params[3:5])
    check_swapper(swapper)
    swapper.release(params[:3])
    swapper.swap_in(params[3:10], wait=True)
    assert same(params[3:10], expected[3:10])


def test_wrong_statuses_change_nothing(swapper: ParameterSwapper) -> None:
    params = parameters(3)
    never = parameters(1)
    expected = values(params)
    with pytest.raises(UnsupportedError, match="available"):
        swapper.swap_in(never)
    swapper.swap_out(params[:2])
    for operation in (swapper.swap_out, swapper.release):
        with pytest.raises(UnsupportedError, match="not available"):
            operation([params[2], params[0]])
    with pytest.raises(UnsupportedError, match="available"):
        swapper.swap_in([params[0], params[2]])
    with pytest.raises(UnsupportedError, match="twice"):
        swapper.swap_in([params[0], params[0]])
    with pytest.raises(MissingNameError):
        swapper.release([params[2]])
    assert [swapper.status(p) for p in params] == [NOT_AVAILABLE, NOT_AVAILABLE, AVAILABLE]
    assert torch.equal(params[2], expected[2])
    check_swapper(swapper)


def _wait(gate: threading.Event) -> None:
    gate.wait()


@pytest.mark.parametrize("writing", [False, True])
def test_what_is_in_flight_is_busy(tmp_path: Path, writing: bool) -> None:
    """Digests wait behind a gate, so that a move is under way as long as it is closed."""
    gate = threading.Event()
    with ParameterSwapper(tmp_path, torch.float32, "1MiB", verify=True) as swapper:
        params = parameters(2)
        swapper.swap_out(params)
        if writing:
            swapper.swap_in(params, wait=True)
        assert swapper.file._digests is not None
        swapper.file._digests.run(lambda: _wait(gate))
        try:
            if writing:
                transfer = swapper.swap_out(params[:1], wait=False)
            else:
                transfer = swapper.swap_in(params[:1])
            before = swapper.statistics()
            for operation in (
                swapper.swap_out,
                swapper.swap_in,
                swapper.release,
                swapper.forget,
                lambda ps: swapper.get_buffer(ps[-1]),
                lambda ps: swapper.cast_and_write(ps, [torch.empty_like(p) for p in ps]),
            ):
                with pytest.raises((BusyError, UnsupportedError)):
                    operation([params[1], params[0]])
                with pytest.raises(BusyError):
                    operation([params[0]])
            assert swapper.status(params[0]) is INFLIGHT
            assert before.inflight == 1
            assert not swapper.ready(params)
            assert not transfer.done()
            check_swapper(swapper)
        finally:
            gate.set()
        transfer.result()
        assert swapper.status(params[0]) is (NOT_AVAILABLE if writing else AVAILABLE)
        check_swapper(swapper)


def test_other_data_than_what_is_stored(swapper: ParameterSwapper) -> None:
    parameter = nn.Parameter(torch.randn(100))
    swapper.swap_out([parameter])
    swapper.swap_in([parameter], wait=True)
    for data in (torch.randn(99), torch.randn(10, 20)[:, :10]):
        parameter.data = data
        with pytest.raises(UnsupportedError):
            swapper.swap_out([parameter])
        assert swapper.status(parameter) is AVAILABLE
        assert torch.equal(parameter.data, data)
    with pytest.raises(UnsupportedError, match="bfloat16"):
        swapper.swap_out([torch.randn(10).bfloat16()])
    parameter.data = torch.randn(100)
    check_again = parameter.detach().clone()
    swapper.swap_out([parameter])
    swapper.swap_in([parameter], wait=True)
    assert torch.equal(parameter, check_again)


def test_no_room_in_the_file(tmp_path: Path) -> None:
    with ParameterSwapper(tmp_path, torch.float32, "1MiB", capacity=10 * UNIT) as swapper:
        params = parameters(3, 4 * 1024)
        expected = values(params)
        swapper.swap_out(params[:2])
        with pytest.raises(CapacityError):
            swapper.swap_out(params[2:])
        assert swapper.status(params[2]) is AVAILABLE
        assert torch.equal(params[2], expected[2])
        check_swapper(swapper)


# -- given memory --------------------------------------------------------------------------------


def test_into_given_buffers(swapper: ParameterSwapper) -> None:
    params = parameters(3)
    expected = values(params)
    swapper.swap_out(params)
    with BufferPool(MIB) as pool:
        buffer = pool.allocate(20_000, torch.float32)
        matrix = torch.empty(3, 10_000)
        given: list[Any] = [buffer, torch.empty(10_001), matrix]
        swapper.swap_in(params, buffers=given).result()
        assert same(params, expected)
        assert params[0].data_ptr() == buffer.address
        assert params[2].data_ptr() == matrix.data_ptr()
        assert swapper.available_bytes == swapper.budget
        swapper.release(params)
        assert not buffer.released, "the caller's stay the caller's"
        buffer.release()
    check_swapper(swapper)
    bad: list[list[Any]] = [
        [torch.empty(10_000), torch.empty(10_001)],
        [torch.empty(10_000), torch.empty(10_001), torch.empty(5)],
        [torch.empty(10_000), torch.empty(10_001), torch.empty(10_002).int()],
        [torch.empty(10_000), torch.empty(10_001), torch.empty(20_004)[::2]],
        [torch.empty(10_000), torch.empty(10_001), None],
        [matrix, matrix, torch.empty(10_002)],
    ]
    for buffers in bad:
        with pytest.raises(UnsupportedError):
            swapper.swap_in(params, buffers=buffers)
        assert {swapper.status(p) for p in params} == {NOT_AVAILABLE}
        check_swapper(swapper)


@pytest.mark.parametrize("shift", [0, 4, 64, 516])
@pytest.mark.parametrize("numel", [1, 1023, 100_001, 700_000])
def test_into_any_memory(swapper: ParameterSwapper, numel: int, shift: int) -> None:
    parameter = nn.Parameter(torch.randn(numel))
    expected = parameter.detach().clone()
    swapper.swap_out([parameter])
    destination = poisoned(numel * 4, shift)
    swapper.swap_into(parameter, destination.view(torch.float32))
    assert torch.equal(destination.view(torch.float32), expected)
    assert guards_intact(destination)
    assert swapper.status(parameter) is NOT_AVAILABLE
    swapper.swap_in([parameter], wait=True)
    with torch.no_grad():
        parameter.add_(1)
    transfer = swapper.swap_into(parameter, destination.view(torch.float32), wait=False)
    transfer.result()
    assert torch.equal(destination.view(torch.float32), expected), "the stored value"
    for bad in (torch.empty(numel + 1), torch.empty(numel, dtype=torch.int32)):
        with pytest.raises(UnsupportedError):
            swapper.swap_into(parameter, bad)
    with pytest.raises(MissingNameError):
        swapper.swap_into(torch.randn(numel), destination.view(torch.float32))


def test_a_buffer_to_fill(swapper: ParameterSwapper) -> None:
    parameter = nn.Parameter(torch.randn(20, 30))
    old, new = parameter.detach().clone(), torch.randn(20, 30)
    view = swapper.get_buffer(parameter)
    assert view.shape == parameter.shape
    assert view.dtype == torch.float32
    assert torch.equal(parameter, old)
    with pytest.raises(UnsupportedError, match="already"):
        swapper.get_buffer(parameter)
    view.copy_(new)
    swapper.swap_out([parameter], release=False)
    assert torch.equal(parameter, new), "memory and drive agree"
    assert parameter.data_ptr() == view.data_ptr()
    check_swapper(swapper)
    swapper.release([parameter])
    swapper.get_buffer(parameter).copy_(old)
    assert swapper.status(parameter) is NOT_AVAILABLE
    swapper.swap_out([parameter])
    assert swapper.status(parameter) is NOT_AVAILABLE
    view = swapper.get_buffer(parameter)
    swapper.swap_in([parameter], wait=True)
    assert parameter.data_ptr() == view.data_ptr(), "what was taken is read into"
    assert torch.equal(parameter, old)
    swapper.release([parameter])
    swapper.get_buffer(parameter)
    swapper.release([parameter])
    assert swapper.available_bytes == swapper.budget
    with pytest.raises(CapacityError):
        swapper.get_buffer(torch.empty(10 * MIB))


def test_a_buffer_of_another_size(swapper: ParameterSwapper) -> None:
    shard = Shard(1, torch.randn(100))
    view = swapper.get_buffer(shard, 128)
    assert view.shape == (128,)
    view.fill_(7)
    swapper.swap_out([shard])
    assert swapper.location(shard)[0].nbytes == 512
    swapper.swap_in([shard], wait=True)
    assert shard.tensor.tolist() == [7] * 128
    with pytest.raises(UnsupportedError):
        swapper.get_buffer(shard, 100)
    with pytest.raises(UnsupportedError):
        swapper.get_buffer(nn.Parameter(torch.randn(100)), 128)


def test_lending_the_free_memory(swapper: ParameterSwapper) -> None:
    params = parameters(4)
    swapper.swap_out(params)
    swapper.swap_in(params, wait=True)
    swapper.release(params[2:])
    free = swapper.available_bytes
    reservation = swapper.reserve_free()
    assert reservation.nbytes == free
    assert swapper.available_bytes == 0
    buffer = reservation.allocate(1000, torch.float32)
    with pytest.raises(CapacityError):
        swapper.swap_in(params[2:])
    swapper.release_reserved()
    swapper.release_reserved()
    swapper.swap_in(params[2:], wait=True)
    buffer.release()
    check_swapper(swapper)


def test_reserved_space(tmp_path: Path) -> None:
    with ParameterSwapper(tmp_path, torch.float32, "1MiB", capacity=12 * UNIT) as swapper:
        params = parameters(2, 4 * 1024 - 10)
        swapper.reserve_space(params)
        assert swapper.location(params[0], must_exist=False) == ()
        with pytest.raises(MissingNameError):
            swapper.location(params[0])
        with pytest.raises(CapacityError):
            swapper.reserve_space(parameters(2, 4 * 1024 - 10))
        with pytest.raises(CapacityError):
            swapper.swap_out(parameters(2, 4 * 1024 - 10))
        swapper.swap_out(params)
        assert sum(piece.nbytes for piece in swapper.location(params[0])) == params[0].nbytes
        swapper.swap_in(params, wait=True)
        swapper.forget(params)
        swapper.swap_out(parameters(3, 4 * 1024 - 10))


def test_a_batch_fits_where_kept_buffers_have_split_the_memory(tmp_path: Path) -> None:
    """Buffers kept for their sizes, one of them taken for the batch, would leave no large hole."""
    with ParameterSwapper(tmp_path, torch.float32, 10 * UNIT) as swapper:
        numel = UNIT // 4
        small = [torch.randn(2 * numel) for _ in range(4)]
        large = [torch.randn(2 * numel), torch.randn(7 * numel)]
        expected = values(large)
        swapper.swap_out([*small, *large])
        swapper.swap_in(small, wait=True)
        swapper.release([small[0], small[2], small[1], small[3]])
        swapper.swap_in(large, wait=True)
        assert same(large, expected)
        check_swapper(swapper)


def test_values_that_nobody_needs_are_forgotten_unread(swapper: ParameterSwapper) -> None:
    params = parameters(3)
    swapper.swap_out(params)
    swapper.swap_in(params[:1], wait=True)
    with pytest.raises(UnsupportedError):
        swapper.forget(params)
    before = swapper.statistics().file.gets
    swapper.forget(params, lose=True)
    assert swapper.statistics().file.gets == before
    assert swapper.statistics().file.names == 0
    assert is_placeholder(params[1].data)
    assert not is_placeholder(params[0].data)


# -- casting -------------------------------------------------------------------------------------


def test_casts_are_those_of_torch(tmp_path: Path) -> None:
    odd = [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3.4e38, 1e-45, 1.00390625]
    sources = [
        torch.tensor(odd * 10),
        torch.randn(40, 2).t(),
        torch.randn(160)[::2],
        torch.randn(80).double(),
        torch.randn(80).half(),
        torch.arange(80),
        torch.randn(80, requires_grad=True),
    ]
    with ParameterSwapper(tmp_path, torch.bfloat16, "1MiB") as swapper:
        params = [torch.zeros(80, dtype=torch.bfloat16) for _ in sources]
        swapper.swap_out(params)
        swapper.cast_and_write(params, sources)
        swapper.swap_in(params, wait=True)
        for param, source in zip(params, sources, strict=True):
            expected = source.detach().reshape(-1).bfloat16()
            assert torch.equal(param.isnan(), expected.isnan())
            kept = ~expected.isnan()
            assert torch.equal(param[kept].view(torch.int16), expected[kept].view(torch.int16))
        check_swapper(swapper)


@pytest.mark.parametrize("wait", [False, True])
def test_cast_and_write(tmp_path: Path, wait: bool) -> None:
    with ParameterSwapper(tmp_path, torch.bfloat16, 40 * UNIT) as swapper:
        params = [nn.Parameter(torch.randn(50, 100).bfloat16()) for _ in range(50)]
        swapper.swap_out(params)
        swapper.swap_in(params[::10], wait=True)
        masters = [torch.randn(5000) for _ in params]
        masters[3] = torch.randn(100, 50).double().t()
        transfer = swapper.cast_and_write(params, masters, wait=wait)
        transfer.result()
        expected = [m.reshape(50, 100).bfloat16() for m in masters]
        assert [swapper.status(p) is AVAILABLE for p in params] == [i % 10 == 0 for i in range(50)]
        assert same(params[::10], expected[::10])
        check_swapper(swapper)
        for parameter, value in zip(params, expected, strict=True):
            destination = torch.empty(50, 100, dtype=torch.bfloat16)
            swapper.swap_into(parameter, destination)
            assert torch.equal(destination, value)
        swapper.wait_writes()
        assert swapper.available_bytes == swapper.budget - 5 * 3 * UNIT


def test_cast_that_can_not_be(tmp_path: Path) -> None:
    with ParameterSwapper(tmp_path, torch.bfloat16, 2 * UNIT) as swapper:
        params = [nn.Parameter(torch.randn(5000).bfloat16()) for _ in range(2)]
        swapper.swap_out(params)
        for sources in ([torch.randn(5000)], [torch.randn(5000), torch.randn(3)], [1, 2]):
            with pytest.raises(UnsupportedError):
                swapper.cast_and_write(params, sources)  # type: ignore[arg-type]
        with pytest.raises(CapacityError) as caught:
            swapper.cast_and_write(params, [torch.randn(5000)] * 2)
        assert caught.value.asked == 10_000
        check_swapper(swapper)
        assert swapper.available_bytes == swapper.budget


# -- failures ------------------------------------------------------------------------------------


@pytest.mark.parametrize("release", [False, True])
def test_failed_write(swapper: ParameterSwapper, release: bool) -> None:
    params = parameters(4)
    swapper.swap_out(params)
    swapper.swap_in(params, wait=True)
    stored = values(params)
    with torch.no_grad():
        for parameter in params:
            parameter.add_(1)
    changed = values(params)
    addresses = [p.data_ptr() for p in params]
    with file_size_limit(1), pytest.raises(NoSpaceError):
        swapper.swap_out(params, release=release)
    assert swapper.ready(params)
    assert same(params, changed)
    assert [p.data_ptr() for p in params] == addresses
    check_swapper(swapper)
    for parameter, value in zip(params, stored, strict=True):
        destination = torch.empty_like(value)
        swapper.swap_into(parameter, destination)
        assert torch.equal(destination, value), "the drive has the old value"
    assert swapper.statistics().failures == 4
    swapper.swap_out(params)
    swapper.swap_in(params, wait=True)
    assert same(params, changed)


def test_failed_write_from_a_buffer(swapper: ParameterSwapper) -> None:
    (parameter,) = parameters(1)
    swapper.swap_out([parameter])
    view = swapper.get_buffer(parameter)
    view.fill_(1)
    with file_size_limit(1):
        swapper.swap_out([parameter], wait=False).exception()
    with pytest.raises(NoSpaceError):
        swapper.wait_writes()
    swapper.wait_writes()
    assert swapper.status(parameter) is NOT_AVAILABLE
    check_swapper(swapper)
    assert bool((view == 1).all())
    swapper.swap_out([parameter])
    swapper.swap_in([parameter], wait=True)
    assert bool((parameter == 1).all())


def test_failed_read(swapper: ParameterSwapper) -> None:
    params = parameters(4)
    expected = values(params)
    swapper.swap_out(params)
    path = swapper.file.paths[0]
    content = Path(path).read_bytes()
    os.truncate(path, 2 * UNIT)
    with pytest.raises(EndOfFileError):
        swapper.swap_in(params, wait=True)
    assert {swapper.status(p) for p in params} == {NOT_AVAILABLE}
    assert all(is_placeholder(p.data) for p in params)
    check_swapper(swapper)
    assert swapper.available_bytes == swapper.budget
    swapper.swap_in(params)
    with pytest.raises(EndOfFileError):
        swapper.wait_reads()
    swapper.wait_reads()
    Path(path).write_bytes(content)
    swapper.swap_in(params, wait=True)
    assert same(params, expected)


def test_corrupt_parameter(tmp_path: Path) -> None:
    with ParameterSwapper(tmp_path, torch.float32, "1MiB", verify=True) as swapper:
        params = parameters(3)
        expected = values(params)
        swapper.swap_out(params)
        where = swapper.location(params[1])[0]
        with open(where.path, "r+b") as file:
            file.seek(where.offset + 100)
            file.write(b"?")
        with pytest.raises(CorruptError):
            swapper.swap_in(params, wait=True)
        assert {swapper.status(p) for p in params} == {NOT_AVAILABLE}
        check_swapper(swapper)
        swapper.swap_in(params[::2], wait=True)
        assert same(params[::2], expected[::2])


def test_cancelled(swapper: ParameterSwapper) -> None:
    params = parameters(3, 300_000)
    expected = values(params)
    for begin, back in (
        (lambda: swapper.swap_out(params, wait=False), AVAILABLE),
        (lambda: swapper.swap_in(params), NOT_AVAILABLE),
    ):
        transfer = begin()
        transfer.cancel()
        try:
            transfer.result()
        except CancelledError:
            assert {swapper.status(p) for p in params} == {back}
            check_swapper(swapper)
            begin().result()
        check_swapper(swapper)
    assert same(params, expected)


def test_memory_that_somebody_else_moves_is_not_given_away(tmp_path: Path) -> None:
    for own in (True, False):
        with (
            BufferPool(8 * MIB) as pool,
            ParameterSwapper(
                tmp_path / str(own), torch.float32, "8MiB", pool=None if own else pool
            ) as swapper,
        ):
            params = [torch.randn(1_000_000), torch.randn(1_000_000)]
            expected = values(params)
            swapper.swap_out(params)
            for _ in range(5):
                swapper.swap_in(params[:1], wait=True)
                other = swapper.file.put({"a copy": params[0].data})
                swapper.release(params[:1])
                swapper.swap_in(params[1:], wait=True)
                other.result()
                swapper.release(params[1:])
                copy = torch.empty(1_000_000)
                swapper.file.get({"a copy": copy}).result()
                assert torch.equal(copy, expected[0])
            swapper.swap_in(params, wait=True)
            assert same(params, expected)
            swapper.release(params)
            check_swapper(swapper)


# -- memory and lifetimes ------------------------------------------------------------------------


def test_memory_is_let_go_at_the_end_of_a_transfer(swapper: ParameterSwapper) -> None:
    """Without waiting for the garbage collector, and even if the transfer is kept."""
    array = np.ones(100_000, np.float32)
    alive = weakref.ref(array)
    parameter = nn.Parameter(torch.from_numpy(array))
    del array
    gc.disable()
    try:
        transfers = [swapper.swap_out([parameter], wait=False)]
        transfers[0].result()
        # The engine's thread may be in the callbacks still.
        transfers.append(swapper.swap_in([parameter]))
        transfers[1].result()
        assert alive() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("seed", [1, 2])
def test_in_somebody_elses_pool(tmp_path: Path, seed: int) -> None:
    capacity = 64 * UNIT
    pool = BufferPool(
        capacity, poison=True, page_lock="no", allocator=RandomAllocator(capacity, seed=seed)
    )
    params = parameters(12, 3000)
    expected = values(params)
    with ParameterSwapper(tmp_path, torch.float32, pool=pool) as swapper:
        assert swapper.budget == capacity
        swapper.swap_out(params)
        for i in range(0, 12, 4):
            swapper.swap_in(params[i : i + 4], wait=True)
            assert same(params[i : i + 4], expected[i : i + 4])
            views = values(params[i : i + 4])
            memory = [p.data for p in params[i : i + 4]]
            swapper.release(params[i : i + 4])
            assert all(m.isnan().all() for m in memory), "the pool has it back"
            assert not any(v.isnan().any() for v in views)
            check_swapper(swapper)
        swapper.swap_in(params[:5], wait=True)
    assert pool.statistics().allocated == 0
    assert same(params[:5], expected[:5]), "what was in memory stays"
    pool.close()


def test_closed(tmp_path: Path) -> None:
    params = parameters(6)
    expected = values(params)
    swapper = ParameterSwapper(tmp_path, torch.float32, "1MiB")
    swapper.swap_out(params)
    swapper.swap_in(params[:2], wait=True)
    transfer = swapper.swap_in(params[2:4])
    swapper.close()
    assert transfer.done()
    assert same(params[:4], expected[:4]), "what was in memory stays, or has come"
    swapper.close()
    operations: list[Any] = [
        lambda: swapper.swap_out(params[:1]),
        lambda: swapper.swap_in(params[4:]),
        lambda: swapper.swap_into(params[4], torch.empty(10_004)),
        lambda: swapper.get_buffer(params[4]),
        lambda: swapper.release(params[:1]),
        lambda: swapper.cast_and_write(params[:1], expected[:1]),
        lambda: swapper.reserve_space(params),
        lambda: swapper.reserve_free(),
        lambda: swapper.location(params[0]),
        lambda: swapper.forget(params[:1]),
    ]
    for operation in operations:
        with pytest.raises(ClosedError):
            operation()
    swapper.wait_reads()
    swapper.wait_writes()
    swapper.release_reserved()
    assert swapper.status(params[4]) is NOT_AVAILABLE
    assert swapper.statistics().swapped_in == 4
    assert not list(tmp_path.rglob("*.spill"))


def test_forgotten_parameters(swapper: ParameterSwapper) -> None:
    params = parameters(3)
    expected = values(params)
    swapper.swap_out(params)
    with pytest.raises(UnsupportedError, match="not available"):
        swapper.forget(params)
    swapper.swap_in(params, wait=True)
    swapper.forget(params)
    assert same(params, expected)
    assert swapper.available_bytes == swapper.budget
    assert len(swapper.file) == 0
    alive = [weakref.ref(p) for p in params]
    del params
    gc.collect()
    assert not any(ref() is not None for ref in alive)


def test_dropped_without_close(tmp_path: Path) -> None:
    params = parameters(3)
    expected = values(params)
    swapper = ParameterSwapper(tmp_path, torch.float32, "1MiB")
    swapper.swap_out(params)
    swapper.swap_in(params)
    transfer = swapper._reads[0]
    del swapper
    gc.collect()
    transfer.result()
    assert same(params, expected)
    assert not list(tmp_path.rglob("*.spill"))


def test_bad_arguments(tmp_path: Path) -> None:
    for arguments in (
        {"dtype": "float32"},
        {"budget": "lots"},
        {"min_bytes": -1},
        {"device": "cuda"},
        {"depth": -1},
        {"capacity": -1},
    ):
        with pytest.raises(UnsupportedError):
            ParameterSwapper(tmp_path, **arguments)
    assert not list(tmp_path.rglob("*.spill"))


def test_forked_child(swapper: ParameterSwapper) -> None:
    params = parameters(2)
    expected = values(params)
    swapper.swap_out(params)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            try:
                swapper.swap_in(params)
            except ClosedError:
                code = 0
            swapper.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    swapper.swap_in(params, wait=True)
    assert same(params, expected)


# -- questions -----------------------------------------------------------------------------------


def test_questions(swapper: ParameterSwapper) -> None:
    assert swapper.swappable(torch.empty(262_144))
    assert swapper.swappable(262_144)
    assert not swapper.swappable(262_143)
    assert not swapper.swappable(Shard(1, torch.empty(10)))
    assert swapper.available_bytes == swapper.budget == 4 * MIB
    assert swapper.available_buffers(1024) == 1024
    assert swapper.available_buffers(1025) == 512
    params = parameters(3)
    assert swapper.ready(params)
    swapper.swap_out(params)
    assert not swapper.ready(params)
    assert swapper.has_room(params)
    statistics = swapper.statistics()
    assert (statistics.available, statistics.not_available, statistics.inflight) == (0, 3, 0)
    assert statistics.bytes_out == sum(p.nbytes for p in params)
    assert statistics.swapped_out == 3
    assert statistics.file.names == 3
    assert "budget" in repr(swapper)


def test_threads(tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(swapper: ParameterSwapper) -> None:
        try:
            params = parameters(3, 5000)
            expected = values(params)
            for _ in range(20):
                swapper.swap_out(params)
                swapper.swap_in(params).result()
                assert same(params, expected)
                swapper.swap_out(params[:1], release=False)
        except BaseException as error:
            failures.append(error)

    with ParameterSwapper(tmp_path, torch.float32, "1MiB", verify=True) as swapper:
        threads = [threading.Thread(target=work, args=(swapper,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures
        check_swapper(swapper)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupts_lose_nothing(tmp_path: Path) -> None:
    params = parameters(8, 4000)
    expected = values(params)
    interrupts = 0
    with (
        ParameterSwapper(tmp_path, torch.float32, 8 * 4 * UNIT) as swapper,
        storm(0.0004) as armed,
    ):
        for _ in range(300):
            away = [p for p in params if swapper.status(p) is NOT_AVAILABLE]
            here = [p for p in params if swapper.status(p) is AVAILABLE]
            try:
                armed[0] = True
                if away:
                    swapper.swap_in(away).result()
                    swapper.swap_out(away[:3], wait=False).result()
                else:
                    swapper.swap_out(here)
            except (KeyboardInterrupt, CancelledError):
                interrupts += 1
            except (BusyError, UnsupportedError):
                pass
            armed[0] = False
            for wait in (swapper.wait_reads, swapper.wait_writes):
                try:
                    wait()
                except CancelledError:
                    pass
            while any(swapper.status(p) is INFLIGHT for p in params):
                pass
            check_swapper(swapper)
        swapper.swap_in([p for p in params if swapper.status(p) is NOT_AVAILABLE], wait=True)
        assert same(params, expected)
        check_swapper(swapper)
    assert interrupts > 20


def test_broken_error_is_an_oserror(swapper: ParameterSwapper) -> None:
    (parameter,) = parameters(1)
    with file_size_limit(1), pytest.raises(OSError) as caught:
        swapper.swap_out([parameter])
    assert isinstance(caught.value, BrokenError)
    assert torch.isfinite(parameter).all()
