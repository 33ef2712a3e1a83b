"""Several ranks that train one model, each with its parameters and optimizer state on a drive.

    torchrun --nproc-per-node 2 examples/ddp_offload.py --folder /mnt/nvme0 --folder /mnt/nvme1

Each rank uses the folder on the drive that is nearest to its GPU, or to its CPUs, and has a file of
its own there. The numbers are those of the same training in memory, which ``--in-memory`` does.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tensorspill.activations import activation_spill
from tensorspill.demo.model import GPT, Shape
from tensorspill.optimizer import SpilledOptimizer, clip_grad_norm_
from tensorspill.topology import nearest_folder
from tensorspill.training import offload, offloaded

SHAPE = Shape(layers=6, width=96, heads=4, context=64)


def main() -> int:
    """Train, and let rank 0 say how it went."""
    options = parse()
    on_gpus = torch.cuda.is_available()
    dist.init_process_group("nccl" if on_gpus else "gloo")
    try:
        device = (
            torch.device("cuda", dist.get_rank() % torch.cuda.device_count())
            if on_gpus
            else (torch.device("cpu"))
        )
        if on_gpus:
            torch.cuda.set_device(device)
        text = train(options, device)
        if dist.get_rank() == 0:
            sys.stdout.write(text + "\n")
    finally:
        dist.destroy_process_group()
    return 0


def train(options: argparse.Namespace, device: torch.device) -> str:
    """Return the losses, and a digest of the trained parameters."""
    torch.manual_seed(0)  # the same weights on every rank
    model = DistributedDataParallel(GPT(SHAPE).to(device))
    folder = nearest_folder(options.folder)
    settings: dict[str, Any] = {"lr": 3e-3, "weight_decay": 0.01}
    losses = []
    with ExitStack() as stack:
        saved: AbstractContextManager[Any] = nullcontext()
        if options.in_memory:
            optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), **settings)
        else:
            offload(model, folder, "1MiB")
            optimizer = SpilledOptimizer(
                torch.optim.AdamW, model.parameters(), folder=folder, budget="2MiB", **settings
            )
            stack.enter_context(optimizer)
            saved = activation_spill(folder, min_bytes="64KiB", budget="4MiB", device=device)
            stack.callback(saved.close)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
        for step in range(options.steps):
            # Each rank sees other data.
            generator = torch.Generator().manual_seed(
                step * dist.get_world_size() + dist.get_rank()
            )
            text = torch.randint(97, 123, (4, SHAPE.context), generator=generator).to(device)
            with saved:
                logits = model(text[:, :-1])
                loss = functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
            loss.backward()  # type: ignore[no-untyped-call]
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        if not options.in_memory:
            offloaded(model).close(restore=True)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return f"losses {' '.join(map(str, losses))}\nparameters {digest.hexdigest()}"


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", action="append", required=True, help="one on each drive")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--in-memory", action="store_true", help="spill nothing")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
