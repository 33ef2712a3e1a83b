"""A ZeRO-3 job on one CPU rank, run as a program: prints its losses as one line of JSON.

    python -m tests.deepspeed_interface.zero3_job FOLDER HANDLE [OPTIMIZER]

HANDLE is memory (nothing on the drive), own (DeepSpeed's operator), ours, ours-swapper (our swapper
of parameters too), or dropping (ours with every second write left out). OPTIMIZER is memory, nvme
or pipelined.
"""

import json
import os
import sys
import warnings

import torch

from tests.deepspeed_interface.dropping import DroppingHandle

WIDTH = 1024
LAYERS = 6
STEPS = 4
#: Of two parameters: every step reads and writes back.
BUFFERS = 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return torch.nn.functional.mse_loss(x.float(), y.float())


def settings(folder: str, handle: str, optimizer: str) -> dict[str, object]:
    zero: dict[str, object] = {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_max_live_parameters": 2 * WIDTH * WIDTH,
        "stage3_prefetch_bucket_size": WIDTH * WIDTH,
        "sub_group_size": 2 * WIDTH * WIDTH,
    }
    if handle != "memory":
        zero["offload_param"] = {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_count": BUFFERS,
            "buffer_size": WIDTH * WIDTH,
        }
        zero["offload_optimizer"] = {"device": "cpu"}
    if optimizer != "memory":
        zero["offload_optimizer"] = {
            "device": "nvme",
            "nvme_path": folder,
            "buffer_count": 12 if optimizer == "pipelined" else 4,
            "pipeline_read": optimizer == "pipelined",
            "pipeline_write": optimizer == "pipelined",
        }
    return {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "aio": {"block_size": 1 << 20, "queue_depth": 8, "overlap_events": True},
    }


def main(folder: str, handle: str, optimizer: str = "memory") -> None:
    warnings.simplefilter("ignore")
    if handle not in ("memory", "own"):
        from tensorspill import deepspeed as ours

        ours.install(swapper=handle == "ours-swapper")
    import deepspeed

    # One rank speaks to nobody; building this operator takes longer than the whole job.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    if handle == "dropping":
        from deepspeed.ops.op_builder import AsyncIOBuilder

        AsyncIOBuilder().load().aio_handle = DroppingHandle
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    store = torch.distributed.HashStore()  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    config = settings(folder, handle, optimizer)
    torch.manual_seed(7)
    with deepspeed.zero.Init(config_dict_or_path=config, dtype=torch.bfloat16):
        model = Model()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=adam, config=config)
    generator = torch.Generator().manual_seed(3)
    losses = []
    for _ in range(STEPS):
        x, y = torch.randn(2, 4, WIDTH, generator=generator).bfloat16()
        loss = engine(x, y)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    sys.stdout.write(json.dumps({"losses": losses, "files": sorted(_files(folder))}) + "\n")
    sys.stdout.flush()
    os._exit(0)  # DeepSpeed's teardown without a launcher is not what is tested


def _files(folder: str) -> list[str]:
    return [name for _, _, names in os.walk(folder) for name in names]


if __name__ == "__main__":
    main(*sys.argv[1:])
