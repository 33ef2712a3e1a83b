"""Digests of many tensors: torch's way, and what is refused."""

import numpy as np
import pytest
import torch

from tensorspill.errors import UnsupportedError
from tensorspill.pool.digest import digest_reference, finished
from tensorspill.pool.kernels import torch_digest
from tensorspill.pool.kernels.digesting import begin_digests
from tensorspill.pool.kernels.tables import cut


def test_on_the_cpu():
    memory = torch.randint(256, (5000,), dtype=torch.uint8)
    views = [memory[lead : lead + nbytes] for lead in range(9) for nbytes in (0, 1, 8, 999)]
    found = begin_digests(views).values()
    assert found == [digest_reference(view.numpy().tobytes()) for view in views]
    assert begin_digests([]).values() == []


def test_torch_equals_the_definition(monkeypatch):
    monkeypatch.setattr(torch_digest, "_CHUNK", 16)
    memory = torch.randint(256, (3000,), dtype=torch.uint8)
    views = [
        memory[lead : lead + nbytes]
        for lead in range(9)
        for nbytes in (0, 1, 7, 8, 9, 127, 128, 129, 2000)
    ]
    views.append(memory[:64].view(torch.float64).reshape(2, 4))
    sums = torch.zeros(len(views), dtype=torch.int64)
    torch_digest.sum_words(views, sums)
    found = [finished(s, view.nbytes) for s, view in zip(sums.tolist(), views, strict=True)]
    expected = [digest_reference(v.reshape(-1).view(torch.uint8).numpy().tobytes()) for v in views]
    assert found == expected


def test_what_is_refused():
    with pytest.raises(UnsupportedError, match="contiguous"):
        begin_digests([torch.zeros(4, 4).t()[1:]])
    with pytest.raises(UnsupportedError, match="meta"):
        begin_digests([torch.empty(4, device="meta")])
    with pytest.raises(UnsupportedError, match="several devices"):
        begin_digests([torch.empty(4, device="meta"), torch.zeros(1)])


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 10, 3, 4, 0], [9, 9], [0, 0]])
def test_blocks_cover_every_range_once(sizes):
    owners, starts, lengths = cut(np.array(sizes, np.int64), 4)
    covered = [[0] * size for size in sizes]
    for owner, start, length in zip(owners, starts, lengths, strict=True):
        assert start % 4 == 0
        assert 0 < length <= 4
        for at in range(start, start + length):
            covered[owner][at] += 1
    assert all(count == 1 for each in covered for count in each)
