"""What keeps memory beside the pools small where budgets are."""

import subprocess
import sys

import pytest

from tensorspill.residency.staging import modest
from tensorspill.residency.trim import trim

MIB = 1 << 20


@pytest.mark.parametrize(
    ("budget", "block"),
    [(4096 * MIB, None), (256 * MIB, None), (255 * MIB, MIB // 2), (MIB, MIB // 8), (0, MIB // 8)],
)
def test_staging_is_a_small_part_of_the_budget(budget, block):
    found = modest(budget, "cpu", {"depth": 8})
    assert found == ({"depth": 8} if block is None else {"depth": 8, "block_bytes": block})


def test_what_the_user_asks_for_stays():
    assert modest(MIB, "cpu", {"block_bytes": MIB}) == {"block_bytes": MIB}
    assert modest(MIB, "cpu", {"backend": "gds"}) == {"backend": "gds"}
    assert modest(MIB, "cuda:0", {}) == {}


LARGE_TENSORS = """
import torch
from tensorspill.residency.trim import trim

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

keep, before = [], resident()
for _ in range(64):
    tensor = torch.ones(1 << 18)
    keep.append(torch.ones(1 << 8))  # what lies above keeps the memory below from going back
    del tensor
    trim(1 << 20)
print(resident() - before)
"""


def test_freed_memory_goes_back():
    done = subprocess.run(
        [sys.executable, "-c", LARGE_TENSORS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 16 * MIB
    trim()
