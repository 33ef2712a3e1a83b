"""A DeepSpeed job whose parameters and optimizer states live on the drive, on our engines.

    python examples/deepspeed_nvme.py --folder /mnt/nvme            # one process
    torchrun --nproc-per-node 2 examples/deepspeed_nvme.py          # or several, with gloo

What a script of your own has to add is the line with `install`, before DeepSpeed is initialised.
"""

import argparse
import os
import tempfile

import torch

from tensorspill import deepspeed as tensorspill_deepspeed

WIDTH, LAYERS, STEPS = 1024, 8, 5


class Model(torch.nn.Module):
    """A stack of layers with a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the loss of a batch."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(x.float(), y.float())


def settings(folder: str) -> dict[str, object]:
    """Return DeepSpeed's configuration: ZeRO-3, everything on the drive."""
    numel = WIDTH * WIDTH
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "aio": {"block_size": 1 << 20, "queue_depth": 32},
        "zero_optimization": {
            "stage": 3,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 3 * numel,
            "stage3_prefetch_bucket_size": numel,
            "sub_group_size": 2 * numel,
            "offload_param": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 4,
                "buffer_size": numel,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": folder,
                "buffer_count": 12,
                "pipeline_read": True,
                "pipeline_write": True,
            },
        },
    }


def main() -> None:
    """Train for a few steps and print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--folder", help="on a fast drive (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as fallback:
        train(options.folder or fallback)


def train(folder: str) -> None:
    """Run the job."""
    tensorspill_deepspeed.install(swapper=True)
    import deepspeed

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0")):
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29555")
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    config = settings(folder)
    torch.manual_seed(0)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(STEPS):
        x, y = torch.randn(2, 4, WIDTH, dtype=torch.bfloat16, device=engine.device)
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        if torch.distributed.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
