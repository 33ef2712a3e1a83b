"""The Triton kernels: run by the interpreter, and compiled for GPUs that need not be here."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tensorspill.pool.kernels import triton_launch

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def test_on_host_memory_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "pytest", "-q", "-p", "no:cacheprovider",
         str(HERE / "interpreter_checks.py")],
        cwd=HERE.parents[2],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


#: Compiles in a child: the parent may have the interpreter's kernels, or none.
_COMPILE = """
import sys, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton.language as tl
from tensorspill.pool.kernels import triton_kernels, triton_launch

def build(kernel, pointers, constants):
    names = [*pointers, *constants]
    source = ASTSource(
        fn=kernel,
        signature=pointers | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    print(triton.compile(source, target=target, options=triton_launch._OPTIONS).asm["ptx"])

size = {"LANES": triton_launch._LANES, "STEPS": triton_launch._STEPS}
build(triton_kernels.add_words, {"table": "*i64", "sums": "*u64"}, size)
for kind, loaded, stored in triton_launch.KINDS.values():
    print("//", kind)
    types = {"SOURCE": getattr(tl, loaded), "TARGET": getattr(tl, stored), "KIND": kind}
    build(triton_kernels.cast_elements, {"table": "*i64"}, types | size)
"""


@pytest.mark.parametrize("generation", [80, 90])
@pytest.mark.thorough
def test_compiled_for_a_gpu_it_moves_sixteen_bytes_at_a_time(generation, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _COMPILE, str(generation)],
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    digest, *casts = re.split(r"^// \w+-\w+$", done.stdout, flags=re.MULTILINE)
    assert "ld.global.v2.b64" in digest
    assert len(casts) == len(triton_launch.KINDS)
    for ptx in casts:
        assert "ld.global.v4.b32" in ptx
        assert "st.global.v4.b32" in ptx


def test_a_failure_of_triton_is_said_once_and_torch_goes_on(monkeypatch, caplog):
    monkeypatch.setattr(triton_launch, "_failed", [])

    def fails():
        raise RuntimeError("no compiler")

    for _ in range(3):
        assert triton_launch.attempt(fails, lambda: "instead") == "instead"
    assert [record.message for record in caplog.records] == [
        "Triton failed: RuntimeError: no compiler; torch does its work from now on"
    ]
    assert "no compiler" in (triton_launch.why_not() or "")
    assert not triton_launch.interpreted()


@pytest.mark.thorough
def test_importing_the_kernels_module_is_left_to_the_first_use():
    code = (
        "import sys\n"
        "import tensorspill.pool.kernels.casting, tensorspill.pool.kernels.digesting\n"
        "sys.exit('triton' in sys.modules or 'numba' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
    assert torch.cuda.is_initialized() is False or torch.cuda.is_available()
