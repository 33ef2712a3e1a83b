"""Checkpoints of a training in one process, written while it goes on; run it again to go on.

python examples/checkpoint_plain.py --folder /mnt/nvme/run1 --steps 40
"""

from __future__ import annotations

import argparse
import sys

import torch
from torch import nn

from tensorspill import checkpoint


def main() -> int:
    """Train from the latest checkpoint on, or from the start."""
    options = parse()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer, "step": 0, "rng": torch.get_rng_state()}
    if checkpoint.latest(options.folder) is not None:
        checkpoint.load(state, options.folder)
        torch.set_rng_state(state["rng"])
        sys.stdout.write(f"going on after step {state['step']}\n")
    saving = None
    for step in range(state["step"] + 1, options.steps + 1):
        x = torch.randn(32, 64)
        loss = nn.functional.cross_entropy(model(x), x[:, :8].argmax(1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            state |= {"step": step, "rng": torch.get_rng_state()}
            # It has copies when this returns. An error of the last one would be raised here.
            saving = checkpoint.async_save(state, options.folder, step=step, keep=2)
            sys.stdout.write(f"step {step}: loss {loss.item():.4f}\n")
    if saving is not None:
        record = saving.result()
        sys.stdout.write(f"{record.path}: {record.nbytes} bytes in {record.seconds:.2f} s\n")
    return 0


def parse() -> argparse.Namespace:
    """Return what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", required=True, help="of all checkpoints of this training")
    parser.add_argument("--steps", type=int, default=40)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
