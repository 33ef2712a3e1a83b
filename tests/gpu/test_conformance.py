"""The conformance suite on memory of a GPU, in processes of their own: torch's, and CuPy's."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(memory, lanes, *arguments):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance",
         *arguments],
        cwd=ROOT,
        env=os.environ | {"TENSORSPILL_TEST_MEMORY": memory, "TENSORSPILL_TEST_LANES": lanes},
        capture_output=True,
        text=True,
        timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]


def check_memory(memory):
    if memory == "cuda-cupy" and importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["cuda-torch", "cuda-cupy"])
def test_staging(memory):
    if "TENSORSPILL_GPU_CHECK" in os.environ:
        pytest.skip("make gpu-check runs it by itself")
    check_memory(memory)
    run(memory, "staged")


@pytest.mark.gds
@pytest.mark.parametrize("memory", ["cuda-torch", "cuda-cupy"])
def test_gpudirect_storage(memory, request):
    check_memory(memory)
    folder = request.config.getoption("--gds-dir")
    run(memory, "gds", f"--basetemp={folder}/tensorspill-tests-{os.getpid()}")
