"""CUDA memory on the stand-in driver."""

from pathlib import Path

import pytest

from tests.pool.cuda.running import run_checks

HERE = Path(__file__).parent


@pytest.mark.parametrize("subject", ["driver", "streams", "arrays", "memory", "page_lock"])
def test_on_the_standin(subject):
    run_checks(HERE / f"checks_{subject}.py")


def test_registration_with_cufile():
    run_checks(HERE / "checks_registration.py", "cufile")


def test_a_driver_without_a_gpu():
    run_checks(HERE / "checks_no_gpu.py", environment={"STANDIN_CUDA_DEVICES": "0"})
