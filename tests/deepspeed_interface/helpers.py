"""What the tests of the DeepSpeed interface share."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tensorspill.deepspeed import AsyncPartitionedParameterSwapper
from tensorspill.deepspeed.status import status_type

#: Elements of a buffer: 1 MiB of bfloat16.
SLOT = 1 << 19


def fresh(nbytes: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


@dataclass
class Param:
    """As much of a ZeRO-3 parameter as a swapper looks at."""

    ds_id: int
    ds_tensor: Any


def param(number: int, swapper: AsyncPartitionedParameterSwapper, numel: int) -> Param:
    """Return a parameter whose partition has fresh content in a buffer of the swapper."""
    made = Param(number, None)
    partition = torch.empty(0, dtype=swapper.dtype)
    partition.data = swapper.get_buffer(made, numel).data
    partition.copy_(torch.randn(numel, generator=torch.Generator().manual_seed(number)))
    partition.ds_numel = numel  # type: ignore[attr-defined]
    partition.status = status_type().AVAILABLE  # type: ignore[attr-defined]
    made.ds_tensor = partition
    return made


def config(folder: Path, count: int = 3, size: int = SLOT, threads: int = 1) -> Any:
    """Return as much of DeepSpeed's configuration as a swapper looks at."""
    offload = SimpleNamespace(nvme_path=str(folder), buffer_count=count, buffer_size=size)
    aio = {
        "block_size": 1 << 18,
        "queue_depth": 8,
        "intra_op_parallelism": threads,
        "single_submit": False,
        "overlap_events": True,
        "use_gds": False,
    }
    return SimpleNamespace(zero_config=SimpleNamespace(offload_param=offload), aio_config=aio)
