"""Checkpoints of a Hugging Face model, and back into the form that `from_pretrained` reads.

    torchrun --nproc-per-node 2 examples/checkpoint_huggingface.py --folder /mnt/nvme/run4

The model is built from a configuration, so nothing is downloaded. It needs ``transformers``.
"""

from __future__ import annotations

import argparse
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import GPT2Config, GPT2LMHeadModel

from tensorspill import checkpoint

CONFIG = GPT2Config(n_layer=2, n_head=2, n_embd=64, n_positions=64, vocab_size=256)


def main() -> int:
    """Train a few steps, save, and let rank 0 export what was saved."""
    options = parse()
    dist.init_process_group("gloo")
    try:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(CONFIG)
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for step in range(options.steps):
            chance = torch.Generator().manual_seed(step * 1000 + dist.get_rank())
            text = torch.randint(97, 123, (4, 32), generator=chance)
            loss = ddp(input_ids=text, labels=text).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        # By its own names, as `from_pretrained` asks for them; the optimizer beside them.
        record = checkpoint.save(model.state_dict() | {"optimizer": optimizer}, options.folder)
        if dist.get_rank() == 0:
            sys.stdout.write(f"{record.path}: bytes by rank {record.shares}\n")
            export(record.path, model, os.path.join(options.folder, "exported"))
    finally:
        dist.destroy_process_group()
    return 0


def export(path: str, model: GPT2LMHeadModel, folder: str) -> None:
    """Load a checkpoint into a new model, and write that as Hugging Face does."""
    other = GPT2LMHeadModel(CONFIG)
    checkpoint.load(other.state_dict(), path)
    other.save_pretrained(folder)
    again = GPT2LMHeadModel.from_pretrained(folder)
    same = all(
        torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True)
    )
    sys.stdout.write(f"{folder}: from_pretrained reads {'the same' if same else 'OTHER'} values\n")


def parse() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", required=True, help="of all checkpoints of this training")
    parser.add_argument("--steps", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
