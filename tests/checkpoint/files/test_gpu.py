"""Tensors in GPU memory: staged, or straight where GPUDirect Storage is there."""

import tempfile

import pytest
import torch

from tensorspill.checkpoint.files.chunks import Box
from tensorspill.checkpoint.files.engines import Engines
from tensorspill.checkpoint.files.reading import Reader, Want
from tests.checkpoint.files.helpers import holds, mixed_state, same, save


def on_gpu(state):
    return {
        name: tensor.detach().cuda() if name != "transposed" else tensor.t().cuda().t()
        for name, tensor in state.items()
    }


def round_trip(folder):
    state = mixed_state()
    path = save(folder, "a", on_gpu(state), writers=2)
    assert holds(path, {name: tensor.detach() for name, tensor in state.items()})
    out = {
        name: torch.full(tensor.shape, 1, device="cuda").to(tensor.dtype)
        for name, tensor in state.items()
    }
    with Reader(path) as reader:
        reader.read(Want(name, Box.whole(tensor.shape), tensor) for name, tensor in out.items())
    assert all(same(out[name].cpu(), state[name].detach()) for name in state)


@pytest.mark.gpu
def test_there_and_back(tmp_path):
    round_trip(tmp_path)


@pytest.mark.gds
def test_straight_from_gpu_memory(request):
    folder = request.config.getoption("--gds-dir")
    with Engines(folder) as engines:
        assert engines.direct(torch.device("cuda:0")) is not None
    with tempfile.TemporaryDirectory(dir=folder) as place:
        round_trip(place)
