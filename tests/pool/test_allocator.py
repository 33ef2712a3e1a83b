"""The extent allocator: invariants after every step, and the lowest hole always."""

import random
import time

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from tensorspill.errors import CapacityError, UnsupportedError
from tensorspill.pool.allocator import ExtentAllocator
from tests.pool.helpers import RandomAllocator, check_invariants


class AllocatorMachine(RuleBasedStateMachine):
    """An allocator against a plain set of units."""

    extents = Bundle("extents")
    UNIT = 64

    def __init__(self) -> None:
        super().__init__()
        self.allocator = self.make(16 * self.UNIT, self.UNIT)
        self.model: dict[int, int] = {}

    def make(self, capacity: int, alignment: int) -> ExtentAllocator:
        return ExtentAllocator(capacity, alignment)

    def holes(self) -> list[tuple[int, int]]:
        """The free ranges, as (start, size), by looking at every unit."""
        used = {u for o, n in self.model.items() for u in range(o, o + n, self.UNIT)}
        found: list[tuple[int, int]] = []
        for unit in range(0, self.allocator.capacity, self.UNIT):
            if unit in used:
                continue
            if found and sum(found[-1]) == unit:
                found[-1] = (found[-1][0], found[-1][1] + self.UNIT)
            else:
                found.append((unit, self.UNIT))
        return found

    def expected(self, size: int) -> set[int]:
        """Where an extent of `size` may go."""
        return {min(start for start, room in self.holes() if room >= size)}

    @rule(target=extents, nbytes=st.integers(0, 400))
    def allocate(self, nbytes: int) -> int | None:
        size = max(1, -(-nbytes // self.UNIT)) * self.UNIT
        holes = self.holes()
        if not any(room >= size for _, room in holes):
            with pytest.raises(CapacityError) as caught:
                self.allocator.allocate(nbytes)
            assert caught.value.asked == nbytes
            assert caught.value.free == sum(room for _, room in holes)
            assert caught.value.largest == max((room for _, room in holes), default=0)
            return None
        expected = self.expected(size)
        offset = self.allocator.allocate(nbytes)
        assert offset in expected
        self.model[offset] = size
        return offset

    @rule(offset=consumes(extents))
    def free(self, offset: int | None) -> None:
        if offset is not None:
            self.allocator.free(offset)
            del self.model[offset]

    @rule(target=extents, offset=extents, part=st.integers(0, 400))
    def split(self, offset: int | None, part: int) -> int | None:
        if offset is None:
            return None
        first = max(1, -(-part // self.UNIT)) * self.UNIT
        if first > self.model[offset]:
            with pytest.raises(UnsupportedError):
                self.allocator.split(offset, part)
            return None
        rest = self.allocator.split(offset, part)
        assert rest == (None if first == self.model[offset] else offset + first)
        if rest is not None:
            self.model[rest] = self.model[offset] - first
            self.model[offset] = first
        return rest

    @rule(offset=st.integers(-64, 3000))
    def free_unknown(self, offset: int) -> None:
        if offset not in self.model:
            with pytest.raises(UnsupportedError):
                self.allocator.free(offset)
            assert offset not in self.allocator

    @rule(more=st.integers(0, 200))
    def grow(self, more: int) -> None:
        before = self.allocator.capacity
        self.allocator.grow(before + more)
        assert self.allocator.capacity == before + more // self.UNIT * self.UNIT

    @invariant()
    def consistent(self) -> None:
        check_invariants(self.allocator)
        assert len(self.allocator) == len(self.model)
        assert all(self.allocator.size_of(o) == n for o, n in self.model.items())
        starts, sizes = self.allocator._holes.starts, self.allocator._holes.sizes
        assert list(zip(starts.tolist(), sizes.tolist(), strict=True)) == self.holes()


class RandomMachine(AllocatorMachine):
    """The same with a policy that places anywhere."""

    def make(self, capacity: int, alignment: int) -> ExtentAllocator:
        return RandomAllocator(capacity, alignment, seed=1)

    def expected(self, size: int) -> set[int]:
        return {
            offset
            for start, room in self.holes()
            for offset in range(start, start + room - size + 1, self.UNIT)
        }


TestAllocatorMachine = AllocatorMachine.TestCase
TestRandomMachine = RandomMachine.TestCase


def test_freed_ranges_are_used_again_lowest_first() -> None:
    allocator = ExtentAllocator(10 * 4096)
    offsets = [allocator.allocate(4096) for _ in range(10)]
    for offset in (offsets[7], offsets[2], offsets[5]):
        allocator.free(offset)
    assert [allocator.allocate(1) for _ in range(3)] == [offsets[2], offsets[5], offsets[7]]


def test_capacity_that_is_no_multiple_is_cut() -> None:
    allocator = ExtentAllocator(10_000, 4096)
    assert (allocator.capacity, allocator.free_bytes, allocator.largest) == (8192, 8192, 8192)


def test_no_capacity() -> None:
    allocator = ExtentAllocator(0)
    with pytest.raises(CapacityError):
        allocator.allocate(0)
    check_invariants(allocator)


@pytest.mark.parametrize("alignment", [0, -1, 3, 4095])
def test_alignment_must_be_a_power_of_two(alignment: int) -> None:
    with pytest.raises(UnsupportedError, match="power of two"):
        ExtentAllocator(4096, alignment)


def test_sizes_must_make_sense() -> None:
    allocator = ExtentAllocator(8192)
    with pytest.raises(UnsupportedError):
        allocator.allocate(-1)
    with pytest.raises(UnsupportedError):
        allocator.grow(4096)
    with pytest.raises(UnsupportedError):
        ExtentAllocator(-4096)
    with pytest.raises(UnsupportedError):
        allocator.split(allocator.allocate(1), -1)
    with pytest.raises(UnsupportedError):
        allocator.size_of(4096)


def test_twenty_thousand_live_extents() -> None:
    chance = random.Random(3)
    allocator = ExtentAllocator(1 << 40)
    live = [allocator.allocate(chance.randrange(1, 1 << 20)) for _ in range(40_000)]
    chance.shuffle(live)
    for _ in range(20_000):
        allocator.free(live.pop())
    steps = 5_000
    begun = time.perf_counter()
    for step in range(steps):
        allocator.free(live[step])
        live[step] = allocator.allocate(chance.randrange(1, 1 << 20))
    # Reported, not judged: the machine may be busy.
    print(f"{(time.perf_counter() - begun) / steps * 1e6:.1f} µs for one free and one allocate")  # noqa: T201
    assert len(allocator) == 20_000
    check_invariants(allocator)
