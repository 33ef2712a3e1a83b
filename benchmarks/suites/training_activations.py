"""Saved tensors on the drive: what that saves in memory, and what it costs in time."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from benchmarks.report import SuiteReport
from benchmarks.rows import Compared, Row, at_least, at_most, figure
from benchmarks.setting import FULL, QUICK, Setting
from tensorspill.activations import ActivationStatistics, activation_spill
from tensorspill.demo.drive import DriveRate, measure
from tensorspill.demo.model import GPT, Shape
from tensorspill.pool.sizes import format_bytes
from tensorspill.profiling.clock import Sample
from tensorspill.profiling.rounds import Results
from tensorspill.spill.file import SpillFile

__all__ = ["run"]

SUITE = "activations"
#: Layers and rows of input, by how much suites move.
CASES = {FULL.large: (12, 16), QUICK.large: (8, 8)}
TINY_CASE = (2, 2)
#: Which part of what autograd saves the budget is.
BUDGETS = {"half spilled": 2, "all spilled": 8}
TWINS = ("in memory", "in memory again")
WARM_UP = 2
SAVED, TIME = 45, 1.1


def run(setting: Setting) -> SuiteReport:
    """Train in processes of their own, with and without spilling, in turn."""
    layers, rows = CASES.get(setting.sizes.large, TINY_CASE)
    setting.tick("time")
    found = _train(setting, layers, rows, setting.rounds, {})
    setting.tick("memory")
    # Freed tensors go back to the system at once, so that memory is what is in use.
    accurate = {"MALLOC_MMAP_THRESHOLD_": "65536"}
    found["memory"] = _train(setting, layers, rows, 1, accurate)["memory"]
    return _report(found, layers, rows)


def _train(
    setting: Setting, layers: int, rows: int, rounds: int, variables: dict[str, str]
) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "benchmarks.suites.training_activations"),
            *(str(setting.folder), str(layers), str(rows), str(rounds)),
        ],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"OMP_WAIT_POLICY": "passive"} | variables,
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _report(found: dict[str, Any], layers: int, rows: int) -> SuiteReport:
    samples: dict[str, list[Sample | None]] = {
        name: [Sample(seconds, 0) for seconds in taken] for name, taken in found["seconds"].items()
    }
    results = Results(samples)
    compared = Compared(SUITE, results, "s", _seconds, TWINS)
    alone = results.median("in memory", _seconds) or 1.0
    memory = found["memory"]
    table: list[Row] = []
    notes = [
        f"the demo's model with {layers} layers, {rows} rows; in memory "
        f"{format_bytes(memory['in memory'])}; gradients equal to the last bit"
    ]
    for name in BUDGETS:
        cost = found["costs"][name]
        keeps_up = cost["drive"] <= alone
        bound = at_most(TIME) if keeps_up and name == "half spilled" else None
        saved = 100 * (1 - memory[name] / memory["in memory"])
        table += [
            compared.row(name, "in memory", bound, name=f"step, {name}"),
            figure(SUITE, f"peak of memory saved, {name}", saved, "%", at_least(SAVED)),
            figure(SUITE, f"transfers hidden, {name}", cost["hidden"], "%"),
        ]
        notes.append(
            f"{name}: {format_bytes(memory[name])} with the pool of {format_bytes(cost['pool'])}; "
            f"the {format_bytes(cost['moved'])} of a step take the drive {cost['drive']:.2f} s, "
            f"compute alone {alone:.2f} s: it {'keeps' if keeps_up else 'does NOT keep'} up"
        )
    return SuiteReport(table, notes, {"step": results})


def _seconds(sample: Sample) -> float:
    return sample.seconds


def main() -> None:
    """Measure; print JSON."""
    folder, layers, rows, rounds = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.manual_seed(0)
    model = GPT(Shape(layers=layers))
    text = torch.randint(256, (rows, 128))
    saved = _saved_bytes(model, text)
    smallest = "256KiB" if saved > 64 << 20 else "16KiB"
    spills = {
        name: activation_spill(
            folder, min_bytes=smallest, budget=saved // part, capacity=2 * saved + (64 << 20)
        )
        for name, part in BUDGETS.items()
    }
    contexts: dict[str, AbstractContextManager[Any]] = {
        TWINS[0]: nullcontext(),
        **spills,
        TWINS[1]: nullcontext(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    memory: dict[str, int] = {}
    expected: list[torch.Tensor] = []
    before = {name: spill.statistics() for name, spill in spills.items()}
    for number in range(WARM_UP + rounds):
        if number == WARM_UP:
            before = {name: spill.statistics() for name, spill in spills.items()}
        for name, context in contexts.items():
            taken, more = _step(model, text, context)
            if number >= WARM_UP:
                seconds[name].append(taken)
                memory[name] = max(memory.get(name, 0), more)
            found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
            expected = expected or found
            if not all(map(torch.equal, found, expected)):
                raise AssertionError("The gradients differ")
    after = {name: spill.statistics() for name, spill in spills.items()}
    for spill in spills.values():
        spill.close()
    with SpillFile(folder, capacity="160MiB") as file:
        rate = measure(file)
    costs = {name: _cost(before[name], after[name], rate, rounds) for name in spills}
    for name, cost in costs.items():
        memory[name] += cost["pool"]
    print(json.dumps({"seconds": seconds, "memory": memory, "costs": costs}))


def _cost(
    before: ActivationStatistics, after: ActivationStatistics, rate: DriveRate, rounds: int
) -> dict[str, Any]:
    """Return what the steps in between moved, each, and how much of it behind compute."""
    read = (after.bytes_in - before.bytes_in) // rounds
    written = (after.bytes_out - before.bytes_out) // rounds
    transfers = after.transfer_seconds - before.transfer_seconds
    stalled = after.stalled_seconds - before.stalled_seconds
    moved = read + written
    return {
        "pool": after.pool.capacity,
        "moved": moved,
        "drive": moved / rate.of_mix(read, written) if moved else 0.0,
        "hidden": 100 * max(0.0, 1 - stalled / transfers) if transfers else 100.0,
    }


def _step(
    model: GPT, text: torch.Tensor, context: AbstractContextManager[Any]
) -> tuple[float, int]:
    """Return the seconds of a step, and by how many bytes memory grew in it at most."""
    model.zero_grad(set_to_none=False)
    gc.collect()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    begun = time.perf_counter()
    with context:
        loss = functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
    torch.autograd.backward(loss)
    taken = time.perf_counter() - begun
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    return taken, peak - resident


def _saved_bytes(model: GPT, text: torch.Tensor) -> int:
    """Return the bytes that autograd saves, each memory once, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = functional.cross_entropy(model(text).flatten(0, 1), text.flatten())
    torch.autograd.backward(loss)  # so that gradients are there before memory is measured
    return sum(t.untyped_storage().nbytes() for at, t in saved.items() if at not in own)


if __name__ == "__main__":
    main()
