"""A state machine of the catalog: transfers end when the machine says so, in any order.

Bytes live in arrays that stand for the drives, and are written and read at the worst moment that
the catalog allows: garbage when a put is planned, the content when it ends; reads only at the end.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tensorspill.errors import BrokenError, CapacityError, MissingNameError
from tensorspill.spill.catalog import Catalog
from tensorspill.spill.items import Item
from tensorspill.spill.plans import Plan
from tensorspill.spill.space import Growth, Space
from tensorspill.spill.tickets import Ticket
from tests.spill.helpers import check_catalog

BLOCK = 4096
RESIDUE_FROM = 32 * BLOCK
NAMES = st.sampled_from("abcdef")
SMALL = st.one_of(st.integers(0, 4 * BLOCK), st.sampled_from([0, 1, BLOCK, BLOCK + 1]))
LARGE = st.integers(RESIDUE_FROM - 1, RESIDUE_FROM + 2 * BLOCK)
ADDRESSES = st.integers(0, 1 << 20)
BATCH = st.dictionaries(NAMES, st.tuples(SMALL | SMALL | LARGE, ADDRESSES), max_size=4)
CAPACITIES = st.one_of(st.none(), st.integers(0, 16 * BLOCK), st.integers(8 * BLOCK, 400 * BLOCK))


class Operation:
    """A put or get under way."""

    def __init__(self, plan: Plan, content: dict[str, bytes]) -> None:
        self.plan = plan
        self.content = content


class CatalogMachine(RuleBasedStateMachine):
    """The catalog against a dictionary of bytes."""

    @initialize(
        drives=st.lists(
            st.sampled_from([(BLOCK, 512), (BLOCK, 1), (4 * BLOCK, 4096)]), min_size=1, max_size=3
        ),
        capacity=CAPACITIES,
        room=st.integers(4 * BLOCK, 200 * BLOCK),
        seed=st.integers(0, 1 << 32),
    )
    def begin(
        self, drives: list[tuple[int, int]], capacity: int | None, room: int, seed: int
    ) -> None:
        self.space = Space(drives, capacity, 16 * BLOCK, RESIDUE_FROM)
        self.catalog = Catalog(self.space, "somewhere")
        self.most = [max(room, BLOCK) for _ in drives]
        self.bytes = [np.zeros(0, "u1") for _ in drives]
        for index in range(len(drives)):
            self.grow(index, self.space.first_size(0))
        self.random = np.random.default_rng(seed)
        self.values: dict[str, bytes] = {}
        self.torn: set[str] = set()
        self.puts: list[Operation] = []
        self.gets: list[Operation] = []
        self.tickets: list[Ticket] = []

    # -- the drives ------------------------------------------------------------------------------

    def grow(self, drive: int, size: int) -> None:
        added = self.random_bytes(size - len(self.bytes[drive])) if size else b""
        self.bytes[drive] = np.concatenate([self.bytes[drive], np.frombuffer(added, "u1")])
        self.space.grown(drive, size)

    def random_bytes(self, nbytes: int) -> bytes:
        return np.random.default_rng(nbytes).bytes(nbytes)

    def write(self, operation: Operation, garbage: bool) -> None:
        plan = operation.plan
        for item, extent in zip(plan.items, plan.extents, strict=True):
            start = 0
            for piece in extent.pieces:
                drive = self.bytes[piece.drive]
                # Extents own all their blocks, so a write may change any of them.
                drive[piece.base : piece.base + piece.room] = self.random.integers(0, 256)
                part = operation.content[item.name][start : start + piece.nbytes]
                if not garbage:
                    drive[piece.offset : piece.offset + piece.nbytes] = np.frombuffer(part, "u1")
                start += piece.nbytes

    def read(self, operation: Operation) -> dict[str, bytes]:
        plan = operation.plan
        return {
            item.name: b"".join(
                self.bytes[p.drive][p.offset : p.offset + p.nbytes].tobytes() for p in extent.pieces
            )
            for item, extent in zip(plan.items, plan.extents, strict=True)
        }

    # -- what users do ---------------------------------------------------------------------------

    def pending(self) -> set[str]:
        return {item.name for operation in self.puts for item in operation.plan.items}

    def grown_or_refused(self, growth: Growth, refused: set[int]) -> None:
        most = self.most[growth.drive]
        size = next((s for s in (growth.wanted, growth.needed) if s <= most), None)
        if size is None:
            refused.add(growth.drive)
        else:
            self.grow(growth.drive, size)
            self.catalog.grown(growth.drive, size)

    def blocked(self, ticket: Ticket) -> None:
        assert self.puts or self.gets, "waits for nothing"
        self.tickets.append(ticket)

    @rule(batch=BATCH)
    def put(self, batch: dict[str, tuple[int, int]]) -> None:
        items = [
            Item(name, torch.empty(nbytes, dtype=torch.uint8), nbytes, address)
            for name, (nbytes, address) in batch.items()
        ]
        refused: set[int] = set()
        while True:
            before = self.catalog.figures()
            try:
                outcome = self.catalog.plan_put(items, refused)
            except CapacityError as error:
                assert self.catalog.figures() == before
                self.check_no_room(batch, error, refused)
                return
            if not isinstance(outcome, Growth):
                break
            self.grown_or_refused(outcome, refused)
        if isinstance(outcome, Ticket):
            self.blocked(outcome)
            return
        assert not self.pending() & set(batch)
        content = {name: self.random.bytes(nbytes) for name, (nbytes, _) in batch.items()}
        operation = Operation(outcome, content)
        assert all(not victim.readers for victim in outcome.victims.values())
        self.puts.append(operation)
        self.write(operation, garbage=True)

    @rule(name=NAMES)
    def fill(self, name: str) -> None:
        """Leave no room for second copies."""
        self.put({name: (self.space.free, 0)})

    @rule(names=st.sets(NAMES, min_size=1), address=ADDRESSES)
    def overwrite(self, names: set[str], address: int) -> None:
        """Put what is there again, with other content."""
        stored = names & self.values.keys()
        self.put({name: (len(self.values[name]), address) for name in sorted(stored)})

    def check_no_room(
        self, batch: dict[str, tuple[int, int]], error: CapacityError, refused: set[int]
    ) -> None:
        """A batch is refused only if it doesn't fit, even where everything else has ended."""
        free = self.space.free
        new = sum(self.space.charge(n) for name, (n, _) in batch.items())
        assert error.asked == new
        assert error.free == free
        # Without a capacity some is lost to drives of different blocks.
        lost = 0 if self.space.capacity is not None else self.space.block * len(self.most)
        assert free < new + lost * len(batch)
        assert not refused or self.space.capacity is None

    @rule(data=st.data(), ok=st.booleans())
    @precondition(lambda self: self.puts)
    def end_put(self, data: st.DataObject, ok: bool) -> None:
        self.finish_put(self.puts.pop(data.draw(st.integers(0, len(self.puts) - 1))), ok)

    def finish_put(self, operation: Operation, ok: bool) -> None:
        if ok:
            self.write(operation, garbage=False)
            self.values |= operation.content
            self.torn -= operation.content.keys()
        else:
            self.torn |= operation.plan.victims.keys()
        self.catalog.settle_put(operation.plan, None if ok else OSError())
        self.check_tickets()

    @rule(names=st.sets(NAMES, max_size=4))
    def get(self, names: set[str]) -> None:
        items = [
            Item(
                name,
                torch.empty(len(self.values.get(name, b"")), dtype=torch.uint8),
                len(self.values.get(name, b"")),
                0,
            )
            for name in names
        ]
        if names & self.pending():
            outcome = self.catalog.plan_get(items)
            assert isinstance(outcome, Ticket)
            self.blocked(outcome)
        elif names - self.values.keys():
            with pytest.raises((MissingNameError, BrokenError)):
                self.catalog.plan_get(items)
        elif names & self.torn:
            with pytest.raises(BrokenError, match="torn"):
                self.catalog.plan_get(items)
        else:
            outcome = self.catalog.plan_get(items)
            assert isinstance(outcome, Plan)
            self.gets.append(Operation(outcome, {name: self.values[name] for name in names}))

    @rule(data=st.data())
    @precondition(lambda self: self.gets)
    def end_get(self, data: st.DataObject) -> None:
        self.finish_get(self.gets.pop(data.draw(st.integers(0, len(self.gets) - 1))))

    def finish_get(self, operation: Operation) -> None:
        assert self.read(operation) == operation.content
        self.catalog.settle_get(operation.plan, None)
        self.check_tickets()

    @rule()
    @precondition(lambda self: self.puts or self.gets)
    def end_all(self) -> None:
        while self.gets:
            self.finish_get(self.gets.pop())
        while self.puts:
            self.finish_put(self.puts.pop(), ok=True)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.pending():
            ticket = self.catalog.delete(name)
            assert ticket is not None
            self.blocked(ticket)
        elif name in self.values or name in self.catalog._planner.reserved:
            assert self.catalog.delete(name) is None
            self.values.pop(name, None)
            self.torn.discard(name)
            self.check_tickets()
        else:
            with pytest.raises(MissingNameError):
                self.catalog.delete(name)

    @rule(sizes=st.dictionaries(NAMES, SMALL | LARGE, max_size=3))
    def reserve(self, sizes: dict[str, int]) -> None:
        refused: set[int] = set()
        while True:
            before = self.catalog.figures()
            try:
                outcome = self.catalog.reserve(sizes, refused)
            except CapacityError:
                assert self.catalog.figures() == before
                return
            if isinstance(outcome, Ticket):
                self.blocked(outcome)
            if not isinstance(outcome, Growth):
                return
            self.grown_or_refused(outcome, refused)

    def check_tickets(self) -> None:
        """Whoever waits is called at every change."""
        for ticket in self.tickets:
            assert ticket._gate.acquire(blocking=False), "nobody was woken"
        self.tickets.clear()

    @invariant()
    def sound(self) -> None:
        check_catalog(self.catalog, [op.plan for op in (*self.puts, *self.gets)])
        assert set(self.catalog.names()) == self.values.keys() | self.pending()

    @invariant()
    def readable(self) -> None:
        """What is stored and not torn is there at any time."""
        for name, extent in self.catalog._stored.items():
            overwritten = any(name in op.plan.victims for op in self.puts)
            if not extent.torn and not overwritten:
                plan = Plan([Item(name, torch.empty(0), 0, 0)])
                plan.extents = [extent]
                assert self.read(Operation(plan, {}))[name] == self.values[name]


CatalogMachine.TestCase.settings = settings(
    stateful_step_count=40, suppress_health_check=[HealthCheck.too_slow]
)
TestCatalogMachine = CatalogMachine.TestCase
