"""The engine for CUDA tensors on the host path, on a GPU."""

import pytest
import torch

import tensorspill
from tensorspill import SpillFile
from tensorspill.engine import Request

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]


def random_tensor(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dtypes(dtype, tmp_path):
    content = random_tensor(1 << 20).view(dtype)
    target = torch.zeros_like(content)
    with (
        tensorspill.open_engine(tmp_path, "cuda", backend="aio") as engine,
        engine.open("x", "w") as file,
    ):
        engine.submit([Request(content, file, 3, write=True)]).result()
        engine.submit([Request(target, file, 3)]).result()
    assert torch.equal(content.view(torch.uint8), target.view(torch.uint8))


def test_the_current_stream(tmp_path):
    """Kernels that are still running make what is written; what is read is not overwritten."""
    nbytes = 32 << 20
    with (
        tensorspill.open_engine(tmp_path, "cuda", backend="aio") as engine,
        engine.open("x", "w", nbytes) as file,
        torch.cuda.stream(torch.cuda.Stream()),
    ):
        content, target = random_tensor(nbytes), torch.empty(nbytes, dtype=torch.uint8).cuda()
        for turn in range(5):
            torch.cuda._sleep(50_000_000)
            content.fill_(turn)
            engine.submit([Request(content, file, write=True)]).wait_on(torch.cuda.current_stream())
            content.fill_(200)
            torch.cuda._sleep(50_000_000)
            target.fill_(201)
            engine.submit([Request(target, file)]).wait_on(torch.cuda.current_stream())
            assert bool((target == turn).all())


def test_thousands_of_tensors(tmp_path):
    tensors = [random_tensor(4096 + i % 7) for i in range(3000)]
    targets = [torch.zeros_like(tensor) for tensor in tensors]
    places = torch.tensor([0, *(t.nbytes for t in tensors)]).cumsum(0).tolist()
    with tensorspill.open_engine(tmp_path, "cuda", backend="aio") as engine:
        with engine.open("x", "w") as file:
            for group, write in ((tensors, True), (targets, False)):
                engine.submit(
                    [
                        Request(tensor, file, place, write=write)
                        for tensor, place in zip(group, places, strict=False)
                    ]
                ).result()
        assert not any("Not page-locked" in note for note in engine.statistics().notes)
    assert all(map(torch.equal, tensors, targets))


def test_a_spill_file(tmp_path):
    tensors = {f"t{i}": random_tensor(10_000 + i).view(torch.int8) for i in range(100)}
    back = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    with SpillFile(tmp_path, device="cuda", backend="aio") as spill:
        spill.put(tensors).result()
        spill.get(back).result()
    assert all(torch.equal(tensors[name], back[name]) for name in tensors)
