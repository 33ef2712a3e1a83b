"""The engine for CUDA tensors on the host path, on the stand-in driver."""

from pathlib import Path

import pytest

from tests.pool.cuda.running import run_checks

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    "subject",
    [
        "bytes",
        "streams",
        "faults",
        pytest.param("spill", marks=pytest.mark.thorough),
        pytest.param("lifetimes", marks=pytest.mark.thorough),
    ],
)
def test_on_the_standin(subject):
    run_checks(HERE / f"checks_{subject}.py")


@pytest.mark.thorough
def test_a_driver_without_batched_copies():
    environment = {"STANDIN_CUDA_DRIVER_VERSION": "12040"}
    run_checks(HERE / "checks_single_copies.py", environment=environment)
