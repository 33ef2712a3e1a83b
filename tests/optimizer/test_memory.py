"""State is never in memory as a whole: not in steps, not when it is saved or loaded."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorspill import checkpoint
from tensorspill.optimizer import SpilledOptimizer
from tests.faults import in_child

COUNT, NUMEL = 24, 1 << 20
STATE = 2 * COUNT * NUMEL * 4
#: Beside the pools: what a save stages, one or two tensors on their way, and what the heap keeps.
ALLOWED = 104 << 20


def test_with_less_memory_than_state(tmp_path):
    """192 MiB of state, saved and loaded twice."""
    more = in_child(lambda: work(tmp_path), timeout=300)
    assert more < ALLOWED < STATE - (64 << 20), more


def work(folder):
    """Return by how many bytes the process's memory grew."""
    parameters = [nn.Parameter(torch.full((NUMEL,), 0.5)) for _ in range(COUNT)]
    gradient = torch.ones(NUMEL)
    for parameter in parameters:
        parameter.grad = gradient
    options: dict[str, Any] = {"budget": "32MiB", "capacity": "448MiB"}
    with (
        SpilledOptimizer(torch.optim.AdamW, parameters, folder=folder / "a", **options) as first,
        SpilledOptimizer(torch.optim.AdamW, parameters, folder=folder / "b", **options) as second,
    ):
        for optimizer in (first, second):
            optimizer.step()
            assert optimizer.statistics().state_bytes == STATE
        Path("/proc/self/clear_refs").write_text("5")  # the most there was is now
        before = memory("VmRSS")
        first.step()
        checkpoint.save({"optimizer": first}, folder / "saved")
        checkpoint.load({"optimizer": second}, folder / "saved")
        second.load_state_dict(first.state_dict())
        second.step()
        more = memory("VmHWM") - before
        assert torch.equal(second.state[parameters[7]]["step"], torch.tensor(3.0))
    return more


def memory(which):
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024
