"""A state machine of spill files on a real drive: always equal to a dictionary."""

import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorspill.engine import Transfer
from tensorspill.errors import (
    BrokenError,
    CapacityError,
    MissingNameError,
    NoSpaceError,
    UnsupportedError,
)
from tensorspill.spill.file import SpillFile
from tests.conformance.data import guards_intact, poisoned, random_bytes
from tests.faults.limits import file_size_limit
from tests.spill.helpers import check_spill, compile_kernels

BLOCK = 4096
NAMES = st.sampled_from("abcde")
SIZES = st.sampled_from([0, 1, 511, BLOCK, BLOCK + 1, 3 * BLOCK]) | st.integers(0, 1 << 18)
SHIFTS = st.sampled_from([0, 1, 64, 512])


class SpillMachine(RuleBasedStateMachine):
    """Transfers are waited for when the machine feels like it."""

    @initialize(
        folders=st.integers(1, 2),
        capacity=st.none() | st.integers(8 * BLOCK, 200 * BLOCK),
        verify=st.booleans(),
    )
    def begin(self, folders: int, capacity: int | None, verify: bool) -> None:
        compile_kernels()
        self.place = Path(tempfile.mkdtemp())
        places = [self.place / str(i) for i in range(folders)]
        self.spill = SpillFile(places, capacity, verify=verify, block_bytes=16 * BLOCK)
        self.values: dict[str, torch.Tensor] = {}
        self.torn: set[str] = set()
        self.puts: list[Transfer] = []
        self.gets: list[tuple[Transfer, torch.Tensor, torch.Tensor]] = []

    def teardown(self) -> None:
        if hasattr(self, "spill"):
            self.wait_for_all()
            check_spill(self.spill)
            self.spill.close()
            assert not list(self.place.rglob("*.spill"))
            shutil.rmtree(self.place)

    @rule(batch=st.dictionaries(NAMES, st.tuples(SIZES, SHIFTS), max_size=4))
    def put(self, batch: dict[str, tuple[int, int]]) -> None:
        tensors = {name: random_bytes(*size) for name, size in batch.items()}
        try:
            self.puts.append(self.spill.put(tensors))
        except CapacityError:
            asked = sum(-(-tensor.nbytes // BLOCK) * BLOCK for tensor in tensors.values())
            assert asked > self.spill.statistics().free
        else:
            self.values |= tensors
            self.torn -= tensors.keys()

    @rule(batch=st.dictionaries(NAMES, SIZES, min_size=1, max_size=3))
    def fail_to_put(self, batch: dict[str, int]) -> None:
        self.wait_for_all()
        tensors = {name: random_bytes(nbytes) for name, nbytes in batch.items()}
        in_place = self.spill.statistics().in_place
        # A file that has to grow can't, which is no failure of the transfer.
        with file_size_limit(1):
            try:
                transfer = self.spill.put(tensors)
            except CapacityError:
                return
            error = transfer.exception()
        if error is None:
            assert all(tensor.nbytes <= 1 for tensor in tensors.values())
            self.values |= tensors
            self.torn -= tensors.keys()
        else:
            assert isinstance(error, NoSpaceError)
            torn = {name for name in self.spill if self.spill.meta(name).torn}
            assert self.torn <= torn <= self.torn | batch.keys()
            assert len(torn - self.torn) <= self.spill.statistics().in_place - in_place
            self.torn = torn

    @rule(names=st.sets(NAMES, min_size=1, max_size=4), shift=SHIFTS)
    def get(self, names: set[str], shift: int) -> None:
        sizes = {name: self.values[name].nbytes if name in self.values else 9 for name in names}
        destinations = {name: poisoned(nbytes, shift) for name, nbytes in sizes.items()}
        if names - self.values.keys():
            with pytest.raises((MissingNameError, BrokenError)):
                self.spill.get(destinations)
        elif names & self.torn:
            with pytest.raises(BrokenError, match="torn"):
                self.spill.get(destinations)
        else:
            transfer = self.spill.get(destinations)
            for name, destination in destinations.items():
                self.gets.append((transfer, destination, self.values[name]))

    @rule(name=NAMES)
    def get_wrong_size(self, name: str) -> None:
        if name in self.values and name not in self.torn:
            with pytest.raises(UnsupportedError):
                self.spill.get({name: poisoned(self.values[name].nbytes + 1)})

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.values:
            self.spill.delete(name)
            del self.values[name]
            self.torn.discard(name)
        else:
            with pytest.raises(MissingNameError):
                self.spill.delete(name)

    @rule()
    @precondition(lambda self: self.gets)
    def wait_for_one(self) -> None:
        self.arrived(*self.gets.pop())

    @rule()
    def wait_for_all(self) -> None:
        while self.gets:
            self.arrived(*self.gets.pop())
        while self.puts:
            self.puts.pop().result()

    def arrived(
        self, transfer: Transfer, destination: torch.Tensor, expected: torch.Tensor
    ) -> None:
        transfer.result()
        assert torch.equal(destination, expected)
        assert guards_intact(destination)

    @invariant()
    def like_a_dictionary(self) -> None:
        assert set(self.spill) == self.values.keys()
        assert len(self.spill) == len(self.values)
        for name, tensor in self.values.items():
            if name not in self.torn:
                assert self.spill.size_of(name) == tensor.nbytes

    @invariant()
    def sound(self) -> None:
        check_spill(self.spill)


SpillMachine.TestCase.settings = settings(
    stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestSpillMachine = SpillMachine.TestCase
