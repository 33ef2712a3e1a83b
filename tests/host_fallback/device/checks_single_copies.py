"""A driver from before batched copies: one call for each piece."""

import pytest

from tensorspill.engine import Request
from tests.host_fallback.device.helpers import Guarded, open_staged, random_array
from tests.standin.control import cuda


def test_without_batches(tmp_path):
    arrays = [random_array(1000 + i) for i in range(50)]
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
        requests = [Request(a, file, i * 2000, write=True) for i, (a, _) in enumerate(arrays)]
        engine.submit(requests).result()
        targets = [Guarded(a.nbytes) for a, _ in arrays]
        engine.submit([Request(t.array, file, i * 2000) for i, t in enumerate(targets)]).result()
    for target, (_, content) in zip(targets, arrays, strict=True):
        assert (target.content() == content).all()
    counts = cuda().counts()
    assert "cuMemcpyBatchAsync" not in counts
    assert counts["cuMemcpyAsync"] == 100


@pytest.mark.parametrize("nbytes", [1, 100_000])
def test_one_tensor(tmp_path, nbytes):
    array, content = random_array(nbytes)
    with open_staged(tmp_path) as engine, engine.open("x", "w") as file:
        engine.submit([Request(array, file, write=True)]).result()
    assert (tmp_path / "x").read_bytes() == content.tobytes()
