"""A state machine of the pool: content, accounts and room, after every step."""

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tensorspill.errors import CapacityError, ClosedError
from tensorspill.pool import Buffer, BufferPool, Reservation
from tests.pool.helpers import RandomAllocator, check_pool

CAPACITY = 16 * 4096
SIZES = st.integers(0, 5 * 4096)
DTYPES = st.sampled_from([torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128])


class PoolMachine(RuleBasedStateMachine):
    """Every live buffer keeps the content that was written to it."""

    buffers = Bundle("buffers")
    tensors = Bundle("tensors")
    reservations = Bundle("reservations")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BufferPool(
            CAPACITY, poison=True, page_lock="no", allocator=RandomAllocator(CAPACITY, seed=7)
        )
        self.content: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.written = 0

    def fill(self, tensor: torch.Tensor) -> None:
        raw = tensor.reshape(-1).view(torch.uint8)
        assert torch.all(raw == 0xFF), "free memory is poisoned"
        expected = torch.randint(0, 255, raw.shape, dtype=torch.uint8)
        raw.copy_(expected)
        self.content[tensor.data_ptr()] = (raw, expected)

    @rule(target=buffers, nbytes=SIZES, dtype=DTYPES)
    def allocate(self, nbytes: int, dtype: torch.dtype) -> Buffer | None:
        largest = self.pool.statistics().largest
        count = nbytes // dtype.itemsize
        if count * dtype.itemsize > largest:
            with pytest.raises(CapacityError) as caught:
                self.pool.allocate(count, dtype)
            assert caught.value.largest == largest
            return None
        buffer = self.pool.allocate(count, dtype)
        if count:
            self.fill(buffer.tensor)
        return buffer

    @rule(buffer=consumes(buffers))
    def release(self, buffer: Buffer | None) -> None:
        if buffer is not None and not buffer.released:
            self.content.pop(buffer.address, None)
            buffer.release()
            with pytest.raises(ClosedError):
                _ = buffer.tensor

    @rule(target=tensors, buffer=consumes(buffers))
    def drop(self, buffer: Buffer | None) -> torch.Tensor | None:
        """Keep only a view of the tensor."""
        return None if buffer is None or not buffer.nbytes else buffer.tensor[:1]

    @rule(target=reservations, sizes=SIZES | st.lists(SIZES, max_size=3))
    def reserve(self, sizes: int | list[int]) -> Reservation | None:
        before = self.pool.statistics()
        try:
            reservation = self.pool.reserve(sizes)
        except CapacityError:
            assert self.pool.statistics() == before
            return None
        total = sum([sizes] if isinstance(sizes, int) else sizes)
        taken = before.free - self.pool.statistics().free
        assert total <= taken == reservation.nbytes < total + 4 * 4096
        return reservation

    @rule(target=buffers, reservation=reservations, nbytes=SIZES)
    def allocate_reserved(self, reservation: Reservation | None, nbytes: int) -> Buffer | None:
        if reservation is None:
            return None
        free = self.pool.statistics().free
        if reservation.released:
            with pytest.raises(ClosedError):
                reservation.allocate(max(nbytes, 1))
            return None
        try:
            buffer = reservation.allocate(nbytes)
        except CapacityError:
            assert reservation.nbytes < nbytes or len(reservation._pieces) > 1
            return None
        if nbytes:
            self.fill(buffer.tensor)
        assert self.pool.statistics().free == free
        return buffer

    @rule(reservation=reservations)
    def release_reservation(self, reservation: Reservation | None) -> None:
        if reservation is not None:
            reservation.release()

    @invariant()
    def consistent(self) -> None:
        check_pool(self.pool)
        for raw, expected in self.content.values():
            assert torch.equal(raw, expected)

    def teardown(self) -> None:
        self.pool.close()
        for raw, expected in self.content.values():
            assert torch.equal(raw, expected), "memory stays valid after close"


TestPoolMachine = PoolMachine.TestCase
