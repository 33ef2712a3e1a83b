"""GPUDirect Storage on a node that has it, in the folder given by --gds-dir."""

import tempfile
from pathlib import Path

import pytest
import torch

from tensorspill import SpillFile, open_engine
from tensorspill.doctor.examination import examine
from tensorspill.engine import Request

pytestmark = pytest.mark.gds


@pytest.fixture
def folder(request):
    with tempfile.TemporaryDirectory(
        prefix="tensorspill-tests-", dir=request.config.getoption("--gds-dir")
    ) as made:
        yield Path(made)


def test_the_doctor_says_that_it_works(folder):
    assert examine(folder).backend("gds").state == "ok"


def test_bytes_go_straight(folder):
    content = torch.randint(256, (64 << 20,), dtype=torch.uint8, device="cuda")
    with open_engine(folder, "cuda", "gds") as engine:
        file = engine.open("x", "w", size=content.nbytes)
        engine.submit([Request(content, file, write=True)]).result()
        back = torch.empty_like(content)
        engine.submit([Request(back, file)]).result()
        assert torch.equal(back, content)
        moved = engine.statistics().by_path
    assert moved["direct"].nbytes == 2 * content.nbytes
    assert (folder / "x").read_bytes() == content.cpu().numpy().tobytes()


def test_auto_takes_it_and_digests_agree(folder):
    tensors = {str(n): torch.randn(n, device="cuda") for n in (1, 1000, 5_000_001)}
    back = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    with SpillFile(folder, device="cuda", verify=True) as spill:
        assert spill.statistics().engines[0].engine == "gds"
        spill.put(tensors).result()
        spill.get(back).result()
    assert all(torch.equal(back[name], tensors[name]) for name in tensors)
