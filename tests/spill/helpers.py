"""What the tests of spill files share: one helper for every invariant, and a storm of Ctrl-C."""

import contextlib
import functools
import gc
import signal
import tempfile
import threading
from collections.abc import Iterable, Iterator

import torch

from tensorspill.spill.catalog import Catalog
from tensorspill.spill.file import SpillFile
from tensorspill.spill.plans import Extent, Plan
from tensorspill.spill.space import Piece
from tests.pool.helpers import check_invariants


@functools.cache
def compile_kernels() -> None:
    """Have everything compiled, and saved for other processes, before limits get in the way."""
    tensor = torch.ones(100)
    with tempfile.TemporaryDirectory() as place, SpillFile(place, verify=True) as spill:
        spill.put({"a": tensor}).result()
        spill.get({"a": tensor}).result()


def check_catalog(catalog: Catalog, under_way: Iterable[Plan] = ()) -> None:
    """Check that every byte is somebody's once, and that the accounts agree.

    Parameters
    ----------
    catalog : Catalog
    under_way : iterable of Plan
        The plans that were not settled.
    """
    with catalog._lock:
        plans = list(under_way)
        stored, pending = catalog._stored, catalog._pending
        reserved = catalog._planner.reserved
        victims = {id(victim): victim for plan in plans for victim in plan.victims.values()}
        dead = {id(extent): extent for plan in plans for extent in plan.extents if extent.dead}
        assert all(extent.readers for extent in dead.values())
        readers = [extent for extent in (*stored.values(), *dead.values()) if extent.readers]
        reading = [id(e) for plan in plans for e in plan.extents if id(e) in map(id, readers)]
        assert all(reading.count(id(extent)) == extent.readers for extent in readers)
        assert catalog._live == len(plans)
        owners: list[tuple[tuple[Piece, ...], int]] = [
            *((e.pieces, e.charge) for e in stored.values() if id(e) not in victims),
            *((e.pieces, e.charge) for e in pending.values()),
            *((e.pieces, e.charge) for e in dead.values()),
            *reserved.values(),
        ]
        for extent in (*stored.values(), *pending.values(), *dead.values()):
            _check_extent(extent)
        assert catalog._space.used == sum(charge for _, charge in owners)
        assert catalog._promised == sum(e.charge for e in dead.values()) + sum(
            stored[name].charge
            for name in pending
            if name in stored and id(stored[name]) not in victims
        )
        _check_space(catalog, [pieces for pieces, _ in owners])


def _check_extent(extent: Extent) -> None:
    assert sum(piece.nbytes for piece in extent.pieces) == extent.nbytes
    assert extent.charge >= extent.nbytes
    for piece in extent.pieces:
        assert piece.base <= piece.offset
        assert piece.offset + piece.nbytes <= piece.base + piece.room


def _check_space(catalog: Catalog, owned: list[tuple[Piece, ...]]) -> None:
    """Check that rooms and spares are exactly the extents of the allocators, which are sound."""
    space = catalog._space
    if space.capacity is not None:
        assert space.used <= space.capacity
        assert all(d.allocator.capacity == space.first_size(0) for d in space.drives)
    for index, drive in enumerate(space.drives):
        rooms = [(p.base, p.room) for pieces in owned for p in pieces if p.drive == index]
        spares = [(base, size) for size, bases in drive.spares.items() for base in bases]
        assert drive.spare_bytes == sum(size for _, size in spares)
        assert sorted(rooms + spares) == sorted(drive.allocator._extents.items())
        check_invariants(drive.allocator)


def check_spill(spill: SpillFile) -> None:
    """Check a spill file; all of it if no transfer is under way."""
    catalog = spill._catalog
    if catalog.figures()["in_flight"]:
        return
    check_catalog(catalog)
    statistics = spill.statistics()
    assert statistics.in_flight == 0
    assert statistics.names == len(spill) == len(list(spill))
    assert statistics.stored_bytes == sum(spill.size_of(name) for name in spill)
    assert not catalog._tickets
    for drive, state in zip(spill._drives, statistics.engines, strict=True):
        assert state.in_flight == 0
        assert drive.file.size > 0
    for name in spill:
        stored = spill.meta(name)
        assert sum(location.nbytes for location in stored.extents) == stored.nbytes
        assert stored.extents == spill.location(name)


@contextlib.contextmanager
def storm(pause: float) -> Iterator[list[bool]]:
    """Interrupt the main thread again and again; each time that the list is set to [True], once."""
    armed, over = [False], threading.Event()

    def handle(*_: object) -> None:
        if armed[0]:
            armed[0] = False
            raise KeyboardInterrupt

    def send() -> None:
        while not over.wait(pause):
            signal.pthread_kill(main, signal.SIGINT)

    main = threading.get_ident()
    # Python reports and drops what is raised in callbacks of the garbage collector.
    gc.disable()
    before = signal.signal(signal.SIGINT, handle)
    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield armed
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
        gc.enable()
