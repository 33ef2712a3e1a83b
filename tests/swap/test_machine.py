"""A state machine of the swapper: every parameter has the value that a dictionary says."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorspill.engine import Transfer
from tensorspill.errors import (
    BusyError,
    CapacityError,
    MissingNameError,
    NoSpaceError,
    UnsupportedError,
)
from tensorspill.pool import BufferPool
from tensorspill.swap.swapper import ParameterSwapper, SwapStatus
from tests.conformance.data import poisoned
from tests.faults.limits import file_size_limit
from tests.pool.helpers import RandomAllocator
from tests.spill.helpers import compile_kernels
from tests.swap.helpers import check_swapper

AVAILABLE, NOT_AVAILABLE = SwapStatus.AVAILABLE, SwapStatus.NOT_AVAILABLE
UNIT = 4096
SIZES = [1, 100, 1024, 1025, 3000, 70_000, 0]
SETS = st.sets(st.integers(0, len(SIZES) - 1), min_size=1, max_size=4)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Compare in one thread: for tensors this small, several would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class SwapperMachine(RuleBasedStateMachine):
    """Values in memory and on the drive are known at any time; transfers end when they like."""

    @initialize(
        units=st.integers(2, 80),
        foreign=st.booleans(),
        verify=st.booleans(),
        seed=st.integers(0, 9),
    )
    def begin(self, units: int, foreign: bool, verify: bool, seed: int) -> None:
        compile_kernels()
        self.place = Path(tempfile.mkdtemp())
        allocator = RandomAllocator(units * UNIT, seed=seed)
        self.pool = BufferPool(units * UNIT, poison=True, page_lock="no", allocator=allocator)
        self.swapper = ParameterSwapper(
            self.place,
            torch.float32,
            units * UNIT,
            pool=self.pool if foreign else None,
            verify=verify,
        )
        self.parameters = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
        self.memory = [p.detach().clone() for p in self.parameters]
        self.drive: dict[int, torch.Tensor] = {}
        self.taken: dict[int, torch.Tensor] = {}
        self.transfers: list[Transfer] = []

    def teardown(self) -> None:
        if hasattr(self, "swapper"):
            self.settle()
            check_swapper(self.swapper)
            here = [i for i in range(len(SIZES)) if self.status(i) is AVAILABLE]
            self.swapper.close()
            for i in here:
                assert torch.equal(self.parameters[i].data, self.memory[i])
            assert self.pool.statistics().allocated == 0
            self.pool.close()
            shutil.rmtree(self.place)

    # -- what is known ---------------------------------------------------------------------------

    def status(self, i: int) -> SwapStatus:
        return self.swapper.status(self.parameters[i])

    def chosen(self, numbers: set[int]) -> tuple[list[int], list[torch.nn.Parameter]]:
        """Settle what is in flight, so that statuses are certain, and return what was chosen."""
        self.settle()
        order = sorted(numbers)
        return order, [self.parameters[i] for i in order]

    def settle(self) -> None:
        while self.transfers:
            self.transfers.pop().result()

    def begun(self, transfer: Transfer, wait: bool) -> None:
        assert transfer.done() or not wait
        self.transfers.append(transfer)

    def values_to_write(self, order: list[int]) -> dict[int, torch.Tensor]:
        """Return what swapping out would write: what was filled in, else what is in memory."""
        return {i: self.taken[i].clone() if i in self.taken else self.memory[i] for i in order}

    def written(self, values: dict[int, torch.Tensor]) -> None:
        self.drive |= values
        for i, value in values.items():
            self.memory[i] = value
            self.taken.pop(i, None)

    # -- moves -----------------------------------------------------------------------------------

    @rule(numbers=SETS, release=st.booleans(), wait=st.booleans())
    def swap_out(self, numbers: set[int], release: bool, wait: bool) -> None:
        order, batch = self.chosen(numbers)
        if any(self.status(i) is NOT_AVAILABLE and i not in self.taken for i in order):
            with pytest.raises(UnsupportedError):
                self.swapper.swap_out(batch)
            return
        values = self.values_to_write(order)
        self.begun(self.swapper.swap_out(batch, wait, release), wait)
        self.written(values)

    @rule(numbers=SETS, wait=st.booleans(), given=st.booleans())
    def swap_in(self, numbers: set[int], wait: bool, given: bool) -> None:
        order, batch = self.chosen(numbers)
        if any(self.status(i) is not NOT_AVAILABLE for i in order):
            with pytest.raises(UnsupportedError):
                self.swapper.swap_in(batch)
            return
        buffers = None
        if given:
            buffers = [poisoned(4 * SIZES[i], 64).view(torch.float32) for i in order]
        free = self.swapper.available_bytes
        try:
            self.begun(self.swapper.swap_in(batch, wait, buffers), wait)
        except CapacityError:
            assert not given
            assert self.swapper.available_bytes == free
            return
        for i in order:
            self.memory[i] = self.drive[i]
            if not given:
                self.taken.pop(i, None)

    @rule(numbers=SETS)
    def release(self, numbers: set[int]) -> None:
        order, batch = self.chosen(numbers)
        if any(i not in self.taken and self.status(i) is NOT_AVAILABLE for i in order):
            with pytest.raises(UnsupportedError):
                self.swapper.release(batch)
        elif any(i not in self.taken and i not in self.drive for i in order):
            with pytest.raises(MissingNameError):
                self.swapper.release(batch)
        else:
            self.swapper.release(batch)
            for i in order:
                self.taken.pop(i, None)

    @rule(numbers=SETS)
    def change(self, numbers: set[int]) -> None:
        order, _ = self.chosen(numbers)
        for i in order:
            if self.status(i) is AVAILABLE:
                self.memory[i] = torch.randn(SIZES[i])
                self.parameters[i].data.copy_(self.memory[i])

    @rule(i=st.integers(0, len(SIZES) - 1))
    def get_buffer(self, i: int) -> None:
        _, (parameter,) = self.chosen({i})
        try:
            view = self.swapper.get_buffer(parameter)
        except UnsupportedError:
            assert i in self.taken
        except CapacityError:
            assert self.swapper.pool.statistics().largest < 4 * SIZES[i]
        else:
            assert i not in self.taken
            self.taken[i] = view.copy_(torch.randn(SIZES[i]))

    @rule(numbers=SETS, wait=st.booleans())
    def cast_and_write(self, numbers: set[int], wait: bool) -> None:
        order, batch = self.chosen(numbers)
        sources = [torch.randn(SIZES[i], dtype=torch.float64) for i in order]
        try:
            transfer = self.swapper.cast_and_write(batch, sources, wait)
        except CapacityError:
            # Some waves may have been written: find out which.
            self.find_out(order, sources)
            return
        self.begun(transfer, wait)
        for i, source in zip(order, sources, strict=True):
            self.drive[i] = source.float()
            if i in self.taken or self.status(i) is not NOT_AVAILABLE:
                self.memory[i] = self.drive[i]
            self.taken.pop(i, None)

    def find_out(self, order: list[int], sources: list[torch.Tensor]) -> None:
        self.swapper.wait_writes()
        for i, source in zip(order, sources, strict=True):
            new = source.float()
            if self.status(i) is AVAILABLE and torch.equal(self.parameters[i].data, new):
                self.memory[i] = new
            entry = self.swapper._entries.find(self.parameters[i])
            if entry is None or entry.taken is None:
                self.taken.pop(i, None)
            if entry is not None and entry.stored:
                stored = torch.empty(SIZES[i])
                self.swapper.swap_into(self.parameters[i], stored)
                assert torch.equal(stored, new) or torch.equal(stored, self.drive[i])
                self.drive[i] = stored

    @rule(i=st.integers(0, len(SIZES) - 1), shift=st.sampled_from([0, 4, 64]))
    def swap_into(self, i: int, shift: int) -> None:
        destination = poisoned(4 * SIZES[i], shift).view(torch.float32)
        if i in self.drive:
            self.swapper.swap_into(self.parameters[i], destination)
            assert torch.equal(destination, self.drive[i])
        else:
            with pytest.raises(MissingNameError):
                self.swapper.swap_into(self.parameters[i], destination)

    @rule(numbers=SETS, release=st.booleans())
    def fail_to_write(self, numbers: set[int], release: bool) -> None:
        order, batch = self.chosen(numbers)
        before = [self.status(i) for i in order]
        values = self.values_to_write(order)
        with file_size_limit(0):
            try:
                self.swapper.swap_out(batch, release=release)
            except UnsupportedError:
                return
            except (NoSpaceError, CapacityError):
                assert [self.status(i) for i in order] == before
                return
        assert all(SIZES[i] == 0 for i in order)
        self.written(values)

    @rule(numbers=SETS)
    def forget(self, numbers: set[int]) -> None:
        order, batch = self.chosen(numbers)
        if any(self.status(i) is NOT_AVAILABLE for i in order):
            with pytest.raises((UnsupportedError, BusyError)):
                self.swapper.forget(batch)
        else:
            self.swapper.forget(batch)
            for i in order:
                self.drive.pop(i, None)
                self.taken.pop(i, None)

    @rule()
    def lend(self) -> None:
        self.settle()
        free = self.swapper.available_bytes
        assert self.swapper.reserve_free().nbytes == free
        self.swapper.release_reserved()
        assert self.swapper.available_bytes == free

    @rule()
    @precondition(lambda self: self.transfers)
    def wait(self) -> None:
        self.swapper.wait_reads()
        self.swapper.wait_writes()
        assert all(transfer.done() for transfer in self.transfers)

    # -- what always holds -----------------------------------------------------------------------

    @invariant()
    def values(self) -> None:
        for i, parameter in enumerate(self.parameters):
            assert parameter.shape == (SIZES[i],)
            if self.status(i) is AVAILABLE:
                assert torch.equal(parameter.data, self.memory[i])
            elif self.status(i) is NOT_AVAILABLE:
                assert parameter.isnan().all()
                assert i in self.drive

    @invariant()
    def sound(self) -> None:
        check_swapper(self.swapper)


SwapperMachine.TestCase.settings = settings(
    stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestSwapperMachine = SwapperMachine.TestCase
