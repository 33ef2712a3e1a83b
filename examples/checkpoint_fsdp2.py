"""Checkpoints of an FSDP2 model through torch.distributed.checkpoint (DCP).

    torchrun --nproc-per-node 4 examples/checkpoint_fsdp2.py --folder /mnt/nvme/run3

With an even number of ranks it is HSDP: two replicas of the model, each shared out to half of the
ranks. Run it again with another number of ranks: DCP asks for other rows, and those are read.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tensorspill import checkpoint


def main() -> int:
    """Train from the latest checkpoint on, or from the start."""
    options = parse()
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(96, 384), nn.GELU(), nn.Linear(384, 96))
        shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        before = resume(model, optimizer, options.folder)
        for step in range(before + 1, before + options.steps + 1):
            chance = torch.Generator().manual_seed(step)
            x = torch.randn(16, 96, generator=chance)
            loss = (model(x) - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        parameters, moments = get_state_dict(model, optimizer)
        dcp.save(
            {"model": parameters, "optimizer": moments, "step": step},
            storage_writer=checkpoint.Writer(options.folder, step=step, keep=2),
            planner=checkpoint.SavePlanner(),
        )
        if dist.get_rank() == 0:
            latest = checkpoint.latest(options.folder)
            sys.stdout.write(f"{latest}, step {step}: loss {loss.item():.4f}\n")
    finally:
        dist.destroy_process_group()
    return 0


def shard(model: nn.Module) -> None:
    """Share the model out to all ranks, or to each half of them."""
    size = dist.get_world_size()
    if size % 2 == 0:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, folder: str) -> int:
    """Load the latest checkpoint, if there is one; return its step."""
    if checkpoint.latest(folder) is None:
        return 0
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "step": 0}
    dcp.load(state, storage_reader=checkpoint.Reader(folder))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    return int(state["step"])


def parse() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", required=True, help="of all checkpoints of this training")
    parser.add_argument("--steps", type=int, default=10, help="to train in this run")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
