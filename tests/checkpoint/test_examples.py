"""The examples run as their first lines say, and go on from where they were."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, name: str, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return _run(
        [*command, "--master-port=0", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"],
        name,
        *arguments,
    )


def _run(command: list[str], name: str, *arguments: str) -> str:
    ended = subprocess.run(
        [*command, str(ROOT / "examples" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return ended.stdout


@pytest.mark.thorough
def test_plain(tmp_path):
    first = _run([sys.executable], "checkpoint_plain.py", f"--folder={tmp_path}", "--steps=20")
    assert "step 20" in first
    second = _run([sys.executable], "checkpoint_plain.py", f"--folder={tmp_path}", "--steps=30")
    assert "going on after step 20" in second
    assert "step 30" in second


@pytest.mark.thorough
def test_ddp(tmp_path):
    found = torchrun(2, "checkpoint_ddp.py", f"--folder={tmp_path}")
    assert "step 10" in found
    shares = re.search(r"\((\d+), (\d+)\)", found)
    assert shares is not None
    assert all(int(share) > 0 for share in shares.groups())
    assert "step 20" in torchrun(1, "checkpoint_ddp.py", f"--folder={tmp_path}")


@pytest.mark.thorough
def test_fsdp2(tmp_path):
    assert "step 10" in torchrun(2, "checkpoint_fsdp2.py", f"--folder={tmp_path}")
    assert "step 20" in torchrun(1, "checkpoint_fsdp2.py", f"--folder={tmp_path}")


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="needs transformers")
@pytest.mark.thorough
def test_huggingface(tmp_path):
    found = torchrun(2, "checkpoint_huggingface.py", f"--folder={tmp_path}")
    assert "the same values" in found
