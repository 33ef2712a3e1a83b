"""Measuring a drive: leaves nothing behind, is kept, and survives a damaged cache."""

import json
import os
from pathlib import Path

import pytest

from tensorspill.errors import BrokenError, NoSpaceError
from tensorspill.topology.ranks.probe import measured_write_mbps, probe_write_mbps

SMALL = 8 << 20


@pytest.mark.parametrize("folder", ["tmp_path", "/dev/shm"])
def test_measures_and_leaves_nothing(tmp_path: Path, folder: str) -> None:
    where = tmp_path if folder == "tmp_path" else Path(folder)
    before = set(os.listdir(where)), len(os.listdir("/proc/self/fd"))
    assert probe_write_mbps(where, nbytes=SMALL) >= 1
    assert (set(os.listdir(where)) - before[0], len(os.listdir("/proc/self/fd"))) == (
        set(),
        before[1],
    )


def test_keeps_what_it_measured(tmp_path: Path) -> None:
    cache = tmp_path / "cache" / "capacities.json"
    first = measured_write_mbps(tmp_path, cache=cache)
    (key,) = json.loads(cache.read_text())
    cache.write_text(json.dumps({key: first + 1, "other": 5}))
    assert measured_write_mbps(tmp_path, cache=cache) == first + 1


@pytest.mark.parametrize("damage", ["", "[]", "{", '{"a": 0}', "\0", '{"a": "fast"}'])
def test_damaged_cache_counts_as_empty(tmp_path: Path, damage: str) -> None:
    cache = tmp_path / "capacities.json"
    cache.write_text(damage)
    assert measured_write_mbps(tmp_path, cache=cache) >= 1
    assert all(rate >= 1 for rate in json.loads(cache.read_text()).values())


def test_unwritable_cache_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert measured_write_mbps(tmp_path, cache=tmp_path / "file" / "capacities.json") >= 1


def test_errors_are_typed(tmp_path: Path) -> None:
    with pytest.raises(NoSpaceError) as caught:
        probe_write_mbps(tmp_path, nbytes=1 << 60)
    assert caught.value.free is not None
    with pytest.raises(BrokenError, match="missing"):
        probe_write_mbps(tmp_path / "missing")
