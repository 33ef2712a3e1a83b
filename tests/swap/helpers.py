"""What the tests of the swapper share: one helper that checks every invariant."""

import itertools

import torch

from tensorspill.pool.sizes import round_up
from tensorspill.swap.entries import Entry
from tensorspill.swap.swapper import ParameterSwapper, SwapStatus
from tests.pool.helpers import check_pool
from tests.spill.helpers import check_spill

UNIT = 4096


def check_swapper(swapper: ParameterSwapper) -> None:
    """Check that statuses, data and memory agree; of what is in flight, as far as they must."""
    with swapper._entries.lock:
        entries = list(swapper._entries)
        flying = any(entry.status is SwapStatus.INFLIGHT for entry in entries)
        for entry in entries:
            _check_entry(swapper, entry)
        if not flying:
            _check_memory(swapper, entries)
    statistics = swapper.statistics()
    assert statistics.available + statistics.not_available + statistics.inflight == len(entries)
    if not flying:
        check_pool(swapper.pool)
        check_spill(swapper.file)


def _check_entry(swapper: ParameterSwapper, entry: Entry) -> None:
    assert swapper.status(entry.owner) is entry.status
    if entry.status is SwapStatus.NOT_AVAILABLE:
        assert entry.stored
        assert entry.home is None
        assert is_placeholder(entry.data) or entry.numel <= 1
    if entry.status is SwapStatus.AVAILABLE and entry.numel > 1:
        assert not is_placeholder(entry.data)
    if entry.status is SwapStatus.AVAILABLE and entry.home is not None:
        assert entry.stored
        assert not entry.home.released
        assert entry.data.data_ptr() == entry.home.address or not entry.numel
    if entry.taken is not None:
        assert not entry.taken.released
    if entry.stored:
        assert swapper.file.size_of(entry.name) == entry.nbytes


def _check_memory(swapper: ParameterSwapper, entries: list[Entry]) -> None:
    """Check that the pool's buffers are exactly those of parameters and those that are kept."""
    buffers = swapper._buffers
    homes = [memory for e in entries for memory in (e.home, e.taken) if memory is not None]
    kept = [buffer for idle in buffers._idle.values() for buffer in idle]
    assert buffers._idle_bytes == sum(round_up(buffer.nbytes, UNIT) for buffer in kept)
    owned = [buffer for buffer in (*homes, *kept, *buffers._busy) if buffer.nbytes]
    ranges = sorted((buffer.address, buffer.address + buffer.nbytes) for buffer in owned)
    for (_, end), (start, _) in itertools.pairwise(ranges):
        assert end <= start, "two parameters share memory"
    if not swapper._reserved:
        rounded = sum(round_up(buffer.nbytes, UNIT) for buffer in owned)
        assert swapper.pool.statistics().allocated == rounded, "a buffer was lost"


def is_placeholder(data: torch.Tensor) -> bool:
    """Whether data has the memory of one element only."""
    return data.untyped_storage().nbytes() == data.element_size()
