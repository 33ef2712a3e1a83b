"""Several ranks: DDP with a spill file for each, and FSDP2's shards."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


def torchrun(*arguments: str) -> str:
    """Run a script in two processes; return what they printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
            *("--master-addr", "127.0.0.1", "--master-port", str(port), *arguments),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.thorough
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_ddp_with_a_drive_for_each_rank(tmp_path):
    """The example: parameters, optimizer state and activations on drives, as in memory."""
    folders = ["--folder", str(tmp_path / "0"), "--folder", str(tmp_path / "1")]
    spilled = torchrun("examples/ddp_offload.py", *folders)
    in_memory = torchrun("examples/ddp_offload.py", *folders, "--in-memory")
    assert "parameters " in spilled
    assert spilled == in_memory
    assert (tmp_path / "0").is_dir()
    assert (tmp_path / "1").is_dir()
    assert not any(tmp_path.rglob("*.spill"))


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
@pytest.mark.thorough
def test_state_of_shards(tmp_path):
    found = torchrun("-m", "tests.optimizer.sharded", str(tmp_path))
    assert found.count("ranks agree") == 2
