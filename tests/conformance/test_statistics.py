"""Statistics add up, and say which option came from where."""

import dataclasses
from pathlib import Path

import pytest

from tensorspill.engine import Engine, Request
from tensorspill.errors import EndOfFileError, UnsupportedError
from tests.conformance.data import poisoned, random_bytes
from tests.conformance.lanes import Lane


def test_bytes_by_path_add_up(engine: Engine):
    sizes = [0, 1, 511, 4096, 5000, 300_000, 1 << 20]
    with engine.open("x", "w", size=4 << 20) as file:
        records = [
            engine.submit(
                [
                    Request(random_bytes(n, shift), file, i * (1 << 19), write=True)
                    for i, n in enumerate(sizes[:-1])
                ]
            ).result()
            for shift in (0, 1, 512)
        ]
        records.append(engine.submit([Request(poisoned(1 << 20), file)]).result())
    for record, expected in zip(records, [sum(sizes[:-1])] * 3 + [1 << 20], strict=True):
        assert record.nbytes == expected == sum(record.by_path.values())
        assert record.seconds > 0
        assert record.gbps > 0
    statistics = engine.statistics()
    assert statistics.bytes_written == 3 * sum(sizes[:-1])
    assert statistics.bytes_read == 1 << 20
    assert statistics.transfers == 4
    assert statistics.requests == 3 * 6 + 1
    paths = statistics.by_path.values()
    assert sum(path.nbytes for path in paths) == statistics.bytes_written + statistics.bytes_read
    for path in paths:
        assert path.operations > 0
        assert path.io_bytes >= path.nbytes
        assert path.seconds > 0
        assert 0 < path.slowest <= path.seconds
        assert path.why


def test_a_failed_transfer_counts_as_failed(engine: Engine, tmp_path: Path):
    (tmp_path / "x").write_bytes(b"short")
    with engine.open("x") as file, pytest.raises(EndOfFileError):
        engine.submit([Request(poisoned(10_000), file)]).result()
    statistics = engine.statistics()
    assert (statistics.failures, statistics.bytes_read) == (1, 0)


def test_records_are_frozen(engine: Engine):
    statistics = engine.statistics()
    with pytest.raises(dataclasses.FrozenInstanceError):
        statistics.transfers = 5  # type: ignore[misc]
    with pytest.raises(TypeError):
        statistics.by_path["direct"] = None  # type: ignore[index]


def test_where_options_come_from(lane: Lane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with lane.open(tmp_path) as engine:
        default = engine.statistics().options
    name = next((n for n, (_, source) in default.items() if source == "default"), None)
    if name is None:
        pytest.skip("this lane sets every option")
    value = default[name][0]
    monkeypatch.setenv(f"TENSORSPILL_{name.upper()}", str(value))
    with lane.open(tmp_path) as engine:
        assert engine.statistics().options[name] == (value, "environment")
    with lane.open(tmp_path, **{name: value}) as engine:
        assert engine.statistics().options[name] == (value, "argument")


def test_an_option_that_does_not_exist(lane: Lane, tmp_path: Path):
    with pytest.raises(UnsupportedError, match="qdepth"):
        lane.open(tmp_path, qdepth=4)
