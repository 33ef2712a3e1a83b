"""What forked ranks should find ready: modules imported, kernels compiled, no threads running."""

import importlib

import pytest
import torch

from tensorspill import checkpoint

_NEEDED = (
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "tensorspill.checkpoint.distributed.dtensors",
)


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Load once, in this process, what every rank needs."""
    torch.set_num_threads(1)
    for name in (*_NEEDED, *(f"tensorspill.checkpoint.{each}" for each in _OWN)):
        importlib.import_module(name)
    folder = tmp_path_factory.mktemp("preloading")
    state = {"w": torch.arange(1 << 16, dtype=torch.float32), "t": torch.zeros(3, 5).t()}
    checkpoint.save(state, folder, compare=True)
    checkpoint.load(state, folder)
    _plan()


_OWN = ("asynchronous", "dcp_planner", "dcp_reader", "dcp_writer", "loading")


def _plan() -> None:
    from tests.checkpoint.plans import plan_of, replicated

    plan_of([[replicated("w", (64, 64), (0, 1))]] * 2, min_chunk=256)
