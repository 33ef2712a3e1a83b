"""The histogram of operations' times."""

import pickle

import numpy as np
import pytest
import torch

from tensorspill import Request, open_engine
from tensorspill.engine.latencies import BUCKETS, Latencies


def test_percentiles_are_at_most_an_eighth_too_large() -> None:
    times = np.random.default_rng(0).lognormal(-8, 2, 5000)
    found = Latencies.of(times)
    assert found.count == 5000
    for share in (0, 1, 50, 90, 99, 99.9, 100):
        exact = np.sort(times)[max(0, int(np.ceil(5000 * share / 100)) - 1)]
        assert exact <= found.percentile(share) * (1 + 1e-9) + 1e-9
        assert found.percentile(share) <= max(exact * 1.126, 2e-6)


def test_extremes() -> None:
    assert Latencies().percentile(99) == 0.0
    assert Latencies.of([0.0, 1e-9]).percentile(100) == pytest.approx(1.024e-6)
    assert Latencies.of([1e6]).count == 1
    assert Latencies.of([1e6]).percentile(50) > 100


def test_sums_and_differences() -> None:
    first, second = Latencies.of([1e-3, 2e-3]), Latencies.of([5e-3])
    assert first + second == Latencies.of([1e-3, 2e-3, 5e-3])
    assert (first + second) - first == second
    assert hash(first) == hash(Latencies.of([2e-3, 1e-3]))
    assert pickle.loads(pickle.dumps(first)) == first
    assert "2 operations" in repr(first)


def test_the_kernel_uses_the_same_buckets() -> None:
    from tensorspill.host_fallback.operation import _bucket

    powers = [v for bits in range(42) for v in ((1 << bits) - 1, 1 << bits, (1 << bits) + 1)]
    rest = [int(v) for v in 10 ** np.random.default_rng(1).uniform(0, 12, 300)]
    for nanoseconds in powers + rest:
        expected = np.flatnonzero(Latencies.of([(nanoseconds + 0.25) / 1e9])._counts)
        assert [_bucket(nanoseconds)] == expected.tolist(), nanoseconds
        assert _bucket(nanoseconds) < BUCKETS


def test_an_engine_counts_every_operation(tmp_path) -> None:
    data = torch.zeros(1 << 20, dtype=torch.uint8)
    with open_engine(tmp_path, block_bytes=65536) as engine:
        with engine.open("a", "w", size=data.nbytes) as file:
            for _ in range(3):
                engine.submit([Request(data, file, write=True)]).result()
        paths = engine.statistics().by_path
    assert sum(path.operations for path in paths.values()) == 48
    for path in paths.values():
        assert path.latencies.count == path.operations
        assert path.latencies.percentile(100) >= path.slowest * 0.999
