"""ZeRO-3 jobs of the installed DeepSpeed on this library's engines, each in its own process."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed"
    ),
]


def run(folder: Path, *arguments: str) -> dict[str, Any]:
    folder.mkdir()
    ended = subprocess.run(
        [sys.executable, "-m", "tests.deepspeed_interface.zero3_job", str(folder), *arguments],
        cwd=ROOT,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=1200,  # its own operator is built first, for minutes
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def in_memory(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    losses: list[float] = run(tmp_path_factory.mktemp("memory") / "job", "memory")["losses"]
    return losses


@pytest.mark.parametrize(
    ("handle", "optimizer"),
    [("ours", "memory"), ("ours", "pipelined"), ("ours-swapper", "nvme")],
)
def test_losses_are_those_of_training_in_memory(
    tmp_path: Path, in_memory: list[float], handle: str, optimizer: str
) -> None:
    found = run(tmp_path / "job", handle, optimizer)
    assert found["losses"] == in_memory
    assert sum(name.endswith("_param.tensor.swp") for name in found["files"]) == 6
    assert any("gradient" in name for name in found["files"]) == (optimizer != "memory")


def test_a_handle_that_drops_writes_changes_them(tmp_path: Path, in_memory: list[float]) -> None:
    assert run(tmp_path / "job", "dropping")["losses"] != in_memory


def _no_own_operator() -> str | None:
    if shutil.which("g++") is None:
        return "no C++ compiler to build DeepSpeed's own operator with"
    if not Path("/usr/include/libaio.h").exists():
        return "no libaio to build DeepSpeed's own operator with"
    return None


@pytest.mark.skipif(_no_own_operator() is not None, reason=str(_no_own_operator()))
def test_losses_are_those_of_its_own_operator(tmp_path: Path, in_memory: list[float]) -> None:
    assert run(tmp_path / "job", "own")["losses"] == in_memory


@pytest.mark.skipif("DEEPSPEED_SOURCE" not in os.environ, reason="no DEEPSPEED_SOURCE to test from")
def test_its_own_unit_tests() -> None:
    """DeepSpeed does not install its tests; ``DEEPSPEED_SOURCE`` names a checkout that has them."""
    tests = Path(os.environ["DEEPSPEED_SOURCE"]) / "tests"
    folders = [f for f in ("unit/v1/nvme", "unit/ops/aio") if (tests / f).is_dir()]
    assert folders
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.deepspeed_interface.plugin", *folders],
        cwd=tests,
        env=os.environ | {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"},
        timeout=1200,
        check=False,
    )
    assert ended.returncode == 0
