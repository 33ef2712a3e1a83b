"""Run as a process: optimizer steps by DeepSpeed's own pipelined swapping, and ours, in turn.

Both keep fp32 master weights and two states of bfloat16 parameters on the drive. What DeepSpeed
writes of gradients in backward is not counted against it; that it reads them in the step is.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tensorspill.optimizer import SpilledOptimizer

LAYERS = 12
WARM_UP = 2


class Model(nn.Module):
    """Layers of equal size."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def main() -> None:
    """Print JSON: seconds of each step, or why there are none."""
    folder, rounds, large = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    width = max(512, int((large / (12 * LAYERS)) ** 0.5) // 64 * 64)
    with contextlib.redirect_stdout(sys.stderr):
        found = measure(folder, rounds, width)
    print(json.dumps(found))


def measure(folder: Path, rounds: int, width: int) -> dict[str, Any]:
    """Return what `main` prints."""
    engine, why = theirs(folder / "deepspeed", width)
    if engine is None:
        return {"why": why}
    model, optimizer = ours(folder / "ours", width)
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for number in range(WARM_UP + rounds):
        x = torch.randn(4, width, generator=torch.Generator().manual_seed(number)).bfloat16()
        torch.autograd.backward(model(x))
        begun = time.perf_counter()
        optimizer.step()
        optimizer.state_tensors.store.collect(wait=True)
        mine = time.perf_counter() - begun
        optimizer.zero_grad()
        engine.backward(engine(x))
        begun = time.perf_counter()
        engine.step()
        other = time.perf_counter() - begun
        if number >= WARM_UP:
            seconds["ours"].append(mine)
            seconds["theirs"].append(other)
    gathered = importlib.import_module("deepspeed").zero.GatheredParameters
    equal = True
    for a, b in zip(model.parameters(), engine.module.parameters(), strict=True):
        with gathered([b]):
            equal = equal and torch.equal(a, b)
    nbytes = 2 * 12 * LAYERS * width * width
    optimizer.close()
    return {**seconds, "nbytes": nbytes, "equal": equal}


def ours(folder: Path, width: int) -> tuple[Model, SpilledOptimizer]:
    """Return the model in memory and its spilled optimizer."""
    torch.manual_seed(0)
    model = Model(width).bfloat16()
    state = 12 * LAYERS * width * width
    optimizer = SpilledOptimizer(
        torch.optim.AdamW,
        model.parameters(),
        folder=folder,
        budget=state // 3,
        capacity=state * 3 // 2,
        master_dtype=torch.float32,
        lr=1e-3,
    )
    return model, optimizer


def theirs(folder: Path, width: int) -> tuple[Any, str]:
    """Return an engine of DeepSpeed's, or why there is none."""
    try:
        deepspeed = importlib.import_module("deepspeed")
        builders = importlib.import_module("deepspeed.ops.op_builder")
        builders.AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # a compiler's, a linker's, or its own
        return None, f"{type(error).__name__}: {error}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "DS_ACCELERATOR": "cpu",
    }
    torch.distributed.init_process_group("gloo")
    folder.mkdir(exist_ok=True)
    numel = width * width
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 32},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": numel,
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(folder),
                "pin_memory": True,
                "buffer_count": 12,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }
    torch.manual_seed(0)
    model = Model(width).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return engine, ""


if __name__ == "__main__":
    main()
