"""Checkpoints of a training on several ranks under DDP: each writes its share of the one model.

    torchrun --nproc-per-node 2 examples/checkpoint_ddp.py --folder /mnt/nvme/run2

All ranks must see the folder. Run it again, with another number of ranks if you like, to go on.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tensorspill import checkpoint


def main() -> int:
    """Train from the latest checkpoint on, or from the start."""
    options = parse()
    dist.init_process_group("gloo")
    try:
        rank = dist.get_rank()
        torch.manual_seed(0)
        layers = nn.Linear(64, 1024), nn.BatchNorm1d(1024), nn.GELU(), nn.Linear(1024, 8)
        ddp = DistributedDataParallel(nn.Sequential(*layers))
        optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-3)
        # Without DDP's prefix in their names they can be loaded by a single process as well.
        state = {"model": ddp.module, "optimizer": optimizer, "step": 0}
        if checkpoint.latest(options.folder) is not None:
            checkpoint.load(state, options.folder)
        for step in range(state["step"] + 1, state["step"] + options.steps + 1):
            chance = torch.Generator().manual_seed(step * 1000 + rank)  # other data on each rank
            x = torch.randn(32, 64, generator=chance)
            loss = nn.functional.cross_entropy(ddp(x), x[:, :8].argmax(1))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        state["step"] = step
        # Its parameters are known to be equal on all ranks, and so is the state of the optimizer:
        # these are cut among the ranks. The statistics of BatchNorm are not: rank 0 writes its own.
        record = checkpoint.save(state, options.folder, step=step, keep=2)
        if rank == 0:
            sys.stdout.write(f"{record.path}, step {step}: loss {loss.item():.4f}\n")
            sys.stdout.write(f"bytes written by each rank: {record.shares}\n")
    finally:
        dist.destroy_process_group()
    return 0


def parse() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", required=True, help="of all checkpoints of this training")
    parser.add_argument("--steps", type=int, default=10, help="to train in this run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
