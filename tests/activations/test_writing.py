"""Which ranges stay in memory, which are written, and which are written together."""

import errno
import gc
from collections import deque

import pytest
import torch

from tensorspill.activations.stored import Place, StoredRange
from tensorspill.activations.watches import StorageWatch, VersionWatch, bytes_of
from tensorspill.activations.writing import WriteBehind
from tensorspill.errors import BrokenError, CapacityError
from tensorspill.residency.clock import TransferClock
from tensorspill.spill.file import SpillFile
from tests.faults import Rule, faulty_file_system

KIB = 1024


class Ranges:
    """Makes ranges as forward does, and forgets those that are gone as a sweep does."""

    def __init__(self, writing):
        self.writing = writing
        self.dropped: deque[tuple[str, int]] = deque()
        self.alive = []

    def hold(self, nbytes, count=1):
        for _ in range(count):
            self.writing.note_ended()
            number = len(self.alive)
            tensor = torch.full((nbytes,), number % 256, dtype=torch.uint8)
            storage = tensor.untyped_storage()
            one = StoredRange(
                number,
                bytes_of(storage, 0, nbytes),
                0,
                StorageWatch(storage),
                VersionWatch(tensor),
                self.dropped,
            )
            self.writing.hold(one)
            self.alive.append(one)

    def drop(self):
        self.alive.clear()
        gc.collect()
        while self.dropped:
            name, serial = self.dropped.popleft()
            if not self.writing.forget(name, serial):
                self.writing.finish()
                self.dropped.append((name, serial))
        self.writing.note_ended()

    @property
    def waiting(self):
        return [one.serial for one in self.alive if one.place is Place.HERE]


@pytest.fixture
def spill_file(tmp_path):
    with SpillFile(tmp_path) as file:
        yield file


def ranges_in(file, limit):
    return Ranges(WriteBehind(file, TransferClock(), limit))


def check_bytes(file, ranges):
    for one in ranges.alive:
        found = one.memory
        if found is None:
            found = torch.empty(one.nbytes, dtype=torch.uint8)
            file.get({one.name: found}).result()
        assert bool((found == one.serial % 256).all())


def test_what_fits_is_not_written(spill_file):
    ranges = ranges_in(spill_file, 800 * KIB)
    ranges.hold(10 * KIB, 70)
    assert ranges.writing.held_bytes == ranges.writing.most_held_bytes == 700 * KIB
    assert ranges.writing.oldest == 0
    assert spill_file.statistics().puts == 0
    ranges.drop()
    assert ranges.writing.idle


def test_the_youngest_stay_and_the_oldest_are_written_together(spill_file):
    ranges = ranges_in(spill_file, 800 * KIB)
    ranges.hold(10 * KIB, 200)
    writing = ranges.writing
    assert writing.most_held_bytes <= 800 * KIB
    # All that the limit lets wait, but for a batch, which is an eighth of it.
    assert 600 <= 10 * sum(serial >= writing.oldest for serial in ranges.waiting) <= 700
    assert spill_file.statistics().puts <= 140 / 10 + 1
    while writing._writes:
        writing._await_first()
    assert ranges.waiting == list(range(writing.oldest, 200))
    check_bytes(spill_file, ranges)
    ranges.drop()
    assert writing.idle
    assert list(spill_file) == []


def test_ranges_of_all_sizes(spill_file):
    """Larger ones get more room for writes; one larger than the limit is written at once."""
    generator = torch.Generator().manual_seed(0)
    ranges = ranges_in(spill_file, 200 * KIB)
    for size in torch.randint(1, 90 * KIB, (60,), generator=generator).tolist():
        ranges.hold(size)
        assert ranges.writing.held_bytes <= 200 * KIB
    ranges.hold(500 * KIB)
    assert ranges.writing.oldest is None
    ranges.hold(KIB)
    ranges.writing.finish()
    assert ranges.writing.held_bytes == 0
    assert ranges.writing.bytes_out == sum(one.nbytes for one in ranges.alive)
    check_bytes(spill_file, ranges)
    ranges.drop()
    assert ranges.writing.idle


def test_ranges_that_are_gone_are_not_written(spill_file):
    ranges = ranges_in(spill_file, 100 * KIB)
    ranges.hold(10 * KIB, 8)
    first = ranges.alive[:2]
    ranges.alive = [None] * 8  # but not swept
    ranges.writing.finish()
    assert ranges.writing.bytes_out == 20 * KIB
    assert ranges.writing.held_bytes == 0
    assert [one.place for one in first] == [Place.AWAY] * 2
    del first
    ranges.drop()
    assert ranges.writing.idle


def test_memory_that_others_resized_is_left(spill_file):
    """What is no longer where it was can't be written."""
    ranges = ranges_in(spill_file, 100 * KIB)
    ranges.hold(10 * KIB, 3)
    ranges.alive[1].memory.untyped_storage().resize_(0)
    ranges.writing.finish()
    assert [one.place for one in ranges.alive] == [Place.AWAY, Place.HERE, Place.AWAY]
    assert ranges.writing.held_bytes == 0
    ranges.drop()
    assert ranges.writing.idle


def test_what_was_cancelled_waits_again(tmp_path):
    """One of a batch is needed: the others of it are as they were before, and are written later."""
    with faulty_file_system(tmp_path) as drive, SpillFile(drive.folder, depth=1) as file:
        ranges = ranges_in(file, 100 * KIB)
        ranges.hold(5 * KIB, 4)  # two of them in one transfer
        drive.rules(Rule("*.spill", "write", stall=True))
        busy = file.put({"busy": torch.zeros(2 << 20, dtype=torch.uint8)})
        ranges.writing._write_beyond(0)
        assert {one.place for one in ranges.alive} == {Place.GOING}
        ranges.alive[0].transfer.cancel()
        drive.rules()
        busy.result()
        file.delete("busy")
        while ranges.writing._writes:
            ranges.writing._await_first()
        assert ranges.waiting == [0, 1]
        assert ranges.alive[2].stored
        assert ranges.alive[3].stored
        assert ranges.writing.oldest == 0
        assert ranges.writing.held_bytes == 10 * KIB
        ranges.writing.finish()
        assert all(one.stored for one in ranges.alive)
        check_bytes(file, ranges)
        ranges.drop()
        assert ranges.writing.idle


def test_a_failure_is_reported_once_and_nothing_is_lost(tmp_path):
    with faulty_file_system(tmp_path) as drive, SpillFile(drive.folder) as file:
        ranges = ranges_in(file, 40 * KIB)
        drive.rules(Rule("*.spill", "write", error=errno.EIO))
        with pytest.raises(BrokenError):
            ranges.hold(10 * KIB, 12)
        ranges.writing.finish()
        drive.rules()
        check_bytes(file, ranges)
        ranges.writing._error = None
        ranges.hold(10 * KIB, 12)
        ranges.writing.finish()
        check_bytes(file, ranges)
        ranges.drop()
        assert ranges.writing.idle


def test_a_full_file(tmp_path):
    with SpillFile(tmp_path, capacity="40KiB") as file:
        ranges = ranges_in(file, 40 * KIB)
        with pytest.raises(CapacityError):
            ranges.hold(10 * KIB, 20)
        check_bytes(file, ranges)
        ranges.drop()
        assert ranges.writing.idle
        ranges.hold(10 * KIB, 4)
        check_bytes(file, ranges)
        ranges.drop()
