"""Memory that training takes with everything on the drive: a model ten times the budget."""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.report import SuiteReport
from benchmarks.rows import at_most, figure
from benchmarks.setting import FULL, QUICK, Setting
from benchmarks.training_model import Case, Spilled, Stack, step
from tensorspill.pool.sizes import format_bytes
from tensorspill.residency.trim import trim

__all__ = ["run"]

SUITE = "memory"
BLOCKS, TIMES_BUDGET = 60, 10
#: Of the budget, for parameters and gradients.
RESIDENT = 0.55
STEPS = 4
#: Of input: few, so that activations are not most of the memory.
ROWS = 16


def run(setting: Setting) -> SuiteReport:
    """Train in a process of its own, once for practice and once to be measured."""
    width = {FULL.large: 768, QUICK.large: 384}.get(setting.sizes.large, 64)
    setting.tick("training")
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.suites.training_memory",
            str(setting.folder),
            str(width),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"},
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    budget, activations = found["budget"], found["activations"]
    return SuiteReport(
        [
            figure(SUITE, "pools / budget", found["pools"] / budget, "", at_most(1.0)),
            figure(
                SUITE,
                "growth of the process / (budget + activations)",
                found["growth"] / (budget + activations),
                "",
                at_most(1.05),
            ),
        ],
        [
            f"memory: parameters of {format_bytes(found['model'])} and twice that of states, a "
            f"budget of {format_bytes(budget)}, activations of {format_bytes(activations)}; the "
            f"process grew by {format_bytes(found['growth'])}"
        ],
    )


def main() -> None:
    """Measure; print JSON."""
    folder, width = Path(sys.argv[1]), int(sys.argv[2])
    case = Case(BLOCKS, width, ROWS)
    budget = BLOCKS * case.block_bytes // TIMES_BUDGET
    # Everything imported, compiled and cached: as many objects, with hardly any bytes in them.
    _train(Case(BLOCKS, 64, case.rows), folder, BLOCKS * Case(BLOCKS, 64, 0).block_bytes)
    gc.collect()
    trim()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _resident()
    pools = _train(case, folder, budget)
    growth = _peak() - before
    print(
        json.dumps(
            {
                "budget": budget,
                "pools": pools,
                "growth": growth,
                "activations": _activations(case),
                "model": BLOCKS * case.block_bytes,
            }
        )
    )


def _train(case: Case, folder: Path, budget: int) -> int:
    """Take some steps; return the bytes of all pools."""
    resident = int(RESIDENT * budget)
    spilled = Spilled(case, folder, resident, budget - resident)
    for number in range(STEPS):
        step(spilled.model, spilled.optimizer, case.batch(number))
    pools = spilled.pool_bytes()
    spilled.close()
    return pools


def _activations(case: Case) -> int:
    """Return the bytes that autograd saves in a forward, without parameters."""
    model = Stack(1, case.width)
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(case.batch(0)).square().mean()
    found = sum(tensor.untyped_storage().nbytes() for at, tensor in saved.items() if at not in own)
    del loss
    return case.blocks * found


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _peak() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main()
